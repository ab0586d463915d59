# The three images and one for demonstrations. The image of a target is plimsoll-TARGET:
#
#   make images REGISTRY=registry.example/team TAG=1.0.0 PUSH=1     operator, supervisor, engine
#   make images IMAGES=engine-faults                                the engine with faults to inject
#
# Packages come from the locks in requirements/, by hash. The base is an index of all platforms.
ARG BASE=debian:trixie-slim@sha256:a29215f6a35e51e22adffa17f89e9d2ef06214e64a2bad10d765c46aea49f11f

FROM ${BASE} AS python
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* \
# The engine and its supervisor share one UID, so that the supervisor may read smaps and signal it.
 && useradd --uid 10001 --no-create-home --home-dir /var/cache/plimsoll plimsoll
ENV PATH=/opt/plimsoll/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

FROM python AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/build && python3 -m venv --without-pip /opt/plimsoll
COPY requirements/build.txt /src/requirements/
RUN /opt/build/bin/pip install --require-hashes -r /src/requirements/build.txt

FROM build AS wheel
COPY pyproject.toml README.md LICENSE /src/
COPY crds /src/crds
COPY operator /src/operator
COPY sidecar /src/sidecar
COPY engine_image /src/engine_image
COPY cli /src/cli
COPY probe /src/probe
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /src/dist /src

FROM build AS faults-wheel
COPY faults /src/faults
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /src/dist /src/faults

FROM build AS operator-packages
COPY requirements/operator.txt /src/requirements/
RUN /opt/build/bin/pip --python /opt/plimsoll/bin/python install --require-hashes -r /src/requirements/operator.txt
COPY --from=wheel /src/dist /src/dist
RUN /opt/build/bin/pip --python /opt/plimsoll/bin/python install --no-deps /src/dist/*.whl

FROM build AS supervisor-packages
COPY requirements/sidecar.txt /src/requirements/
RUN /opt/build/bin/pip --python /opt/plimsoll/bin/python install --require-hashes -r /src/requirements/sidecar.txt
COPY --from=wheel /src/dist /src/dist
RUN /opt/build/bin/pip --python /opt/plimsoll/bin/python install --no-deps /src/dist/*.whl

FROM build AS engine-packages
COPY requirements/engine.txt /src/requirements/
RUN /opt/build/bin/pip --python /opt/plimsoll/bin/python install --require-hashes -r /src/requirements/engine.txt
COPY --from=wheel /src/dist /src/dist
RUN /opt/build/bin/pip --python /opt/plimsoll/bin/python install --no-deps /src/dist/*.whl

FROM engine-packages AS engine-faults-packages
COPY --from=faults-wheel /src/dist /src/faults-dist
RUN /opt/build/bin/pip --python /opt/plimsoll/bin/python install --no-deps /src/faults-dist/*.whl

FROM python AS operator
COPY --from=operator-packages /opt/plimsoll /opt/plimsoll
USER 10001:10001
ENTRYPOINT ["plimsoll-operator"]

FROM python AS supervisor
COPY --from=supervisor-packages /opt/plimsoll /opt/plimsoll
USER 10001:10001
ENTRYPOINT ["plimsoll-supervisor"]

FROM python AS engine
# Triton compiles its driver's interface and each kernel's launcher with a C compiler, at run time.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=engine-packages /opt/plimsoll /opt/plimsoll
ENV HOME=/var/cache/plimsoll HF_HOME=/var/cache/plimsoll/huggingface \
    TRITON_CACHE_DIR=/var/cache/plimsoll/triton
USER 10001:10001
ENTRYPOINT ["python", "-m", "plimsoll_engine"]

FROM engine AS engine-faults
COPY --from=engine-faults-packages /opt/plimsoll /opt/plimsoll
