"""A real nginx between the trainer and its workers: a caching proxy for blobs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from rollover.engine.servers.launch import free_port

_CONFIG = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/temp;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  proxy_cache_path {folder}/cache keys_zone=blobs:1m max_size=1g;
  server {{
    listen 127.0.0.1:{port};
    location /blobs/ {{
      proxy_pass {upstream}/;
      proxy_http_version 1.1;
      proxy_set_header Authorization "Bearer {token}";
      proxy_set_header Host $proxy_host;
      proxy_connect_timeout 2s;
      proxy_read_timeout 5s;
      proxy_cache blobs;
      proxy_cache_valid 200 1d;
      proxy_cache_lock on;
    }}
  }}
}}
"""


def nginx_program() -> str | None:
    return shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


class Relay:
    """nginx in one process, so that a signal to it is one to all of it.

    Args:
        upstream: the URL of the blobs that it hands on.
    """

    name = "nginx"

    def __init__(self, folder: Path, upstream: str) -> None:
        self._folder, self._upstream = folder, upstream
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/blobs"
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, token: str) -> None:
        """Write the configuration: the relay asks for blobs with a worker's token."""
        self._folder.mkdir()
        text = _CONFIG.format(folder=self._folder, port=self.port, upstream=self._upstream, token=token)
        (self._folder / "nginx.conf").write_text(text)

    def start(self) -> None:
        program = nginx_program()
        assert program is not None
        command = [program, "-p", str(self._folder), "-c", str(self._folder / "nginx.conf")]
        with (self._folder / "said.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        logs = (self._folder / name for name in ("said.log", "error.log"))
        return "".join(f"-- {log.name}\n{log.read_text()[-2000:]}" for log in logs if log.exists())
