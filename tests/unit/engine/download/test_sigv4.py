"""Signatures of requests, against the worked examples of the Amazon S3 API reference."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from plimsoll_engine.download.sigv4 import Credentials, encode_path, encode_query, sign

HOST = "examplebucket.s3.amazonaws.com"
AT = datetime(2013, 5, 24, tzinfo=UTC)
KEYS = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.mark.parametrize(
    ("path", "query", "headers", "signature"),
    [
        (
            "/test.txt",
            {},
            {"Range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "/",
            {"lifecycle": ""},
            {},
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "/",
            {"prefix": "J", "max-keys": "2"},
            {},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_the_published_examples(
    path: str, query: dict[str, str], headers: dict[str, str], signature: str
) -> None:
    sent = sign(HOST, path, query, headers, KEYS, "us-east-1", AT)
    assert sent["Authorization"].endswith(f",Signature={signature}")
    assert "20130524/us-east-1/s3/aws4_request" in sent["Authorization"]
    assert headers.items() <= sent.items()


def test_a_temporary_credential_signs_its_token() -> None:
    sent = sign(HOST, "/", {}, {}, Credentials("A", "B", "T"), "eu-central-1", AT)
    assert sent["x-amz-security-token"] == "T"
    assert ";x-amz-security-token," in sent["Authorization"]
    assert "B" not in repr(Credentials("A", "B", "T"))


def test_names_are_encoded_once() -> None:
    assert encode_path("/a b/ü+1=%.bin") == "/a%20b/%C3%BC%2B1%3D%25.bin"
    assert encode_query({"prefix": "a/b c", "list-type": "2"}) == "list-type=2&prefix=a%2Fb%20c"
