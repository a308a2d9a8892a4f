"""A small object store that speaks the S3 protocol on loopback: it checks each signature (version 4) and who may do
what, and fails on request."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tests.swarm.http_kit import QuietHandler, http_server

KEY, SECRET, REGION, BUCKET = "AKIAEXAMPLEEXAMPLE00", "a-secret-that-nobody-may-see", "eu-north-1", "weights"


@dataclass
class Bucket:
    """What the store holds, by key, and what it was asked."""

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Content type and cache control, by key."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and key, in order."""
    fault: Callable[[str, str], tuple[int, str] | None] | None = None
    """Given method and key, the status and code of an answer that is an error."""

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a client that may do everything."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT": self.endpoint,
        }


@contextmanager
def s3() -> Iterator[Bucket]:
    """Serve a bucket."""
    bucket = Bucket()

    class Handler(QuietHandler):
        def do_PUT(self) -> None:
            self._answer("PUT")

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("DELETE")  # of many, the only POST there is

        def _answer(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            name, _, key = unquote(parts.path).lstrip("/").partition("/")
            bucket.asked.append((method, key))
            problem = self._refusal(body) or (bucket.fault(method, key) if bucket.fault else None)
            if problem is None and name != BUCKET:
                problem = (404, "NoSuchBucket")
            if problem is not None:
                status, code = problem
                return self._say(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())
            if method == "PUT":
                bucket.objects[key] = body
                bucket.headers[key] = {n: self.headers.get(n, "") for n in ("Content-Type", "Cache-Control")}
                return self._say(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
            if method == "DELETE":
                gone = re.findall(r"<Key>([^<]*)</Key>", body.decode())
                for key in gone:
                    bucket.objects.pop(key, None)
                rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in gone)
                return self._say(200, f"<DeleteResult>{rows}</DeleteResult>".encode())
            return self._list(dict(parse_qsl(parts.query)).get("prefix", ""))

        def _list(self, prefix: str) -> None:
            rows = "".join(
                f"<Contents><Key>{key}</Key><Size>{len(content)}</Size><ETag>x</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key, content in sorted(bucket.objects.items())
                if key.startswith(prefix)
            )
            self._say(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode())

        def _refusal(self, body: bytes) -> tuple[int, str] | None:
            """Check the signature as Amazon's documentation says."""
            words = self.headers.get("Authorization", "").replace(",", " ").split()
            given = dict(word.partition("=")[::2] for word in words[1:])
            if not words or words[0] != "AWS4-HMAC-SHA256":
                return 403, "AccessDenied"
            who, day, region, service, last = given["Credential"].split("/")
            if who != KEY:
                return 403, "InvalidAccessKeyId"
            digest = self.headers["x-amz-content-sha256"]
            if digest not in (hashlib.sha256(body).hexdigest(), "UNSIGNED-PAYLOAD"):
                return 400, "XAmzContentSHA256Mismatch"
            parts = urlsplit(self.path)
            query = "&".join(
                f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}"
                for n, v in sorted(parse_qsl(parts.query, keep_blank_values=True))
            )
            signed = given["SignedHeaders"].split(";")
            headers = "".join(f"{name}:{' '.join(self.headers[name].split())}\n" for name in signed)
            request = "\n".join([self.command, parts.path, query, headers, given["SignedHeaders"], digest])
            scope = f"{day}/{region}/{service}/{last}"
            hashed = hashlib.sha256(request.encode()).hexdigest()
            text = "\n".join(["AWS4-HMAC-SHA256", self.headers["x-amz-date"], scope, hashed])
            key = f"AWS4{SECRET}".encode()
            for word in (day, region, service, last):
                key = hmac.digest(key, word.encode(), "sha256")
            good = hmac.compare_digest(hmac.digest(key, text.encode(), "sha256").hex(), given["Signature"])
            return None if good else (403, "SignatureDoesNotMatch")

        def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/xml", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http_server(Handler) as bucket.endpoint:
        yield bucket
