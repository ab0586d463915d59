"""AWS Signature Version 4 for requests without a body, in headers.

Source: "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)" in the
Amazon S3 API reference, whose examples are this module's tests. S3 encodes a path only once.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
UNRESERVED = "-_.~"


@dataclass(frozen=True)
class Credentials:
    """AWS credentials. ``token`` belongs to temporary ones and is empty otherwise."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str = field(default="", repr=False)


def encode_path(path: str) -> str:
    """Return the percent-encoded path, for URL and signature."""
    return quote(path, safe=f"/{UNRESERVED}")


def encode_query(query: Mapping[str, str]) -> str:
    """Return the percent-encoded query, sorted by name, for URL and signature."""
    pairs = sorted((quote(k, safe=UNRESERVED), quote(v, safe=UNRESERVED)) for k, v in query.items())
    return "&".join(f"{key}={value}" for key, value in pairs)


def sign(
    host: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    credentials: Credentials,
    region: str,
    at: datetime,
) -> dict[str, str]:
    """Return ``headers`` of a GET request and the headers that authorize it.

    ``at`` is in UTC; ``path`` is not encoded.
    """
    stamp, day = at.strftime("%Y%m%dT%H%M%SZ"), at.strftime("%Y%m%d")
    sent = {**headers, "x-amz-content-sha256": EMPTY_SHA256, "x-amz-date": stamp}
    if credentials.token:
        sent["x-amz-security-token"] = credentials.token
    named = {key.lower(): value.strip() for key, value in {**sent, "host": host}.items()}
    names = ";".join(sorted(named))
    lines = "".join(f"{key}:{named[key]}\n" for key in sorted(named))
    request = "\n".join(("GET", encode_path(path), encode_query(query), lines, names, EMPTY_SHA256))
    scope = f"{day}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    sent["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope},"
        f"SignedHeaders={names},Signature={signature}"
    )
    return sent
