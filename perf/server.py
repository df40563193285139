"""Find, start, watch and stop a Triton server that serves `triton_model_repo/`.

The server is the one inside the `nvidia-pytriton` wheel of the running Python, or an installed one
(/opt/tritonserver, PATH). Everything a start needs lies in one temporary directory, removed at the end:
links to the Python backend, and a model repository whose config.pbtxt carries the operator's parameters.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

import psutil

from perf.ports import choose_ports
from runtime.errors import CommitKVError, ConfigError

REPO_ROOT = Path(__file__).resolve().parents[1]
MODEL_NAME = "tensorrt_llm"
KILL_AFTER_S = 10.0
TENANT_HEADER = "^commitkv[-_]tenant([-_][0-9a-z]+)?$"
MODEL_POLL_S = 0.5
POLL_S = 0.1  # until something that was started is ready
PORT_TRIES = 3


class ServerStartError(CommitKVError):
    """The server could not be found, could not start, or did not become ready in time."""


class PortLostError(ServerStartError):
    """Another program took a port after we saw it free: Triton listens only when the model is loaded."""


@dataclass(frozen=True)
class ServerOptions:
    """What one start needs. A port of 0 means: any free one.

    parameters: model parameters of `tensorrt_llm` (see its config.pbtxt), as text.
    grace_s: how long a stop lets running turns finish.   append_log: keep what the log file holds already.
    arguments: further ones for tritonserver.
    """

    model_repository: Path = REPO_ROOT / "triton_model_repo"
    parameters: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    grace_s: float = 30.0
    ready_timeout_s: float = 180.0
    log_path: Path | None = None
    append_log: bool = False
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class TritonInstall:
    """binary: tritonserver. wheel_root: site-packages that hold the wheel, or None for an installed server."""

    binary: Path
    wheel_root: Path | None


def find_triton() -> TritonInstall:
    """The wheel's server first, then /opt/tritonserver, then PATH. Raises ServerStartError."""
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.submodule_search_locations:
        package = Path(next(iter(spec.submodule_search_locations)))
        binary = package / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return TritonInstall(binary, package.parent)
    installed = Path("/opt/tritonserver/bin/tritonserver")
    found = str(installed) if installed.is_file() else shutil.which("tritonserver")
    if found:
        return TritonInstall(Path(found), None)
    raise ServerStartError(
        "Triton server: found neither the nvidia-pytriton wheel in this Python nor /opt/tritonserver nor a "
        "tritonserver on PATH; run `make setup`, or `pip install --no-deps nvidia-pytriton==0.7.0`"
    )


def check_numpy() -> None:
    """The wheel's Python stub hands over empty tensors with numpy 2 and dies. Raises ServerStartError."""
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        raise ServerStartError(
            f"numpy: got {numpy.__version__}, expected a version under 2 (Triton's Python stub breaks with 2); "
            "run `pip install 'numpy<2'`"
        )


def link_backend(install: TritonInstall, into: Path) -> Path:
    """Backend directory with links to the Python backend and the stub of the running Python."""
    assert install.wheel_root is not None
    server = install.wheel_root / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerStartError(f"Triton's Python stub: none for Python {version} in the wheel; use Python 3.11 or 3.12")
    python = into / "backends" / "python"
    python.mkdir(parents=True)
    for source in (*(server / "backends" / "python").iterdir(), stub):
        if source.is_file():
            (python / source.name).symlink_to(source)
    return python.parent


def write_repository(options: ServerOptions, into: Path) -> Path:
    """A copy of the model repository: code is linked, config.pbtxt carries the parameters."""
    repository = into / "models"
    for model in sorted(p for p in options.model_repository.iterdir() if (p / "config.pbtxt").is_file()):
        target = repository / model.name
        target.mkdir(parents=True)
        text = (model / "config.pbtxt").read_text(encoding="utf-8")
        if model.name == MODEL_NAME:
            text += "".join(_parameter(key, value) for key, value in options.parameters.items())
        (target / "config.pbtxt").write_text(text, encoding="utf-8")
        for version in (p for p in model.iterdir() if p.is_dir()):
            (target / version.name).symlink_to(version)
    if not repository.is_dir():
        raise ConfigError(
            f"model repository: {options.model_repository} holds no model (directory with a config.pbtxt); "
            "pass the repository's triton_model_repo/"
        )
    return repository


def _parameter(key: str, value: str) -> str:
    quoted = "".join(
        f"\\{byte:03o}" if byte < 32 or byte in b'"\\' or byte > 126 else chr(byte) for byte in value.encode()
    )
    return f'parameters {{ key: "{key}" value {{ string_value: "{quoted}" }} }}\n'


def server_environment(install: TritonInstall) -> dict[str, str]:
    """The stub must load the running Python's own libpython, and find its packages by PATH."""
    environment = dict(os.environ)
    environment.pop("LD_PRELOAD", None)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if install.wheel_root is not None:
        libraries = [str(sysconfig.get_config_var("LIBDIR")), str(install.wheel_root / "nvidia_pytriton.libs")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    # A waiting OpenMP thread sleeps soon instead of spinning on a core that the server or a client needs: with a
    # busy neighbour on two cores, decode was ten times faster that way, and a little slower on a quiet machine.
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    return environment


class TritonServer:
    """One running server; use as a context manager. Raises ServerStartError or ConfigError from `start`."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._prefix = ""
        self._log: Path | None = None
        self._log_start = 0  # bytes: what lies before is of earlier servers
        self._stopping = threading.Event()
        self.model_died = False

    @property
    def http_url(self) -> str:
        return f"{self.options.host}:{self.ports['http']}"

    @property
    def grpc_url(self) -> str:
        return f"{self.options.host}:{self.ports['grpc']}"

    @property
    def metrics_url(self) -> str:
        return f"{self.options.host}:{self.ports['metrics']}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while the server runs."""
        return None if self._process is None else self._process.poll()

    @property
    def _wanted_ports(self) -> dict[str, int]:
        options = self.options
        return {"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port}

    def start(self) -> Self:
        install = find_triton()
        check_numpy()
        tries = PORT_TRIES if 0 in self._wanted_ports.values() else 1
        try:
            for left in reversed(range(tries)):
                try:
                    self._start_once(install)
                    break
                except PortLostError:
                    self._end(grace_s=0.0)
                    if not left or self._stopping.is_set():
                        raise
        except BaseException:
            self.stop(grace_s=0.0)
            raise
        return self

    def _start_once(self, install: TritonInstall) -> None:
        self.ports = choose_ports(self.options.host, self._wanted_ports)
        self._directory = Path(tempfile.mkdtemp(prefix="commitkv-triton-"))
        self._prefix = f"commitkv_{os.getpid()}_{self.ports['grpc']}_"
        self._log = self.options.log_path or self._directory / "server.log"
        command = self._command(install, self._directory)
        with _open_log(self._log, "ab" if self.options.append_log else "wb") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(install),
                start_new_session=True,
            )
        self._wait_ready()
        threading.Thread(target=self._watch_model, name="triton-model", daemon=True).start()

    def _command(self, install: TritonInstall, directory: Path) -> list[str]:
        options = self.options
        command = [str(install.binary), f"--model-repository={write_repository(options, directory)}"]
        if install.wheel_root is not None:
            command.append(f"--backend-directory={link_backend(install, directory)}")
        for kind in ("http", "grpc", "metrics"):
            command += [f"--{kind}-address={options.host}", f"--{kind}-port={self.ports[kind]}"]
        return [
            *command,
            f"--exit-timeout-secs={max(1, round(options.grace_s))}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            f"--backend-config=python,stub-timeout-seconds={max(30, round(options.ready_timeout_s))}",
            "--disable-auto-complete-config",
            # What a front end says of the tenant reaches the model; see runtime/deploy/.
            *(f"--{kind}-header-forward-pattern={TENANT_HEADER}" for kind in ("http", "grpc")),
            "--log-verbose=0",
            *options.arguments,
        ]

    def _watch_model(self) -> None:
        """Ends the server with its model's process: Triton would stay up, say ready, and leave clients waiting."""
        stubs = psutil.Process(self.pid).children()
        while not self._stopping.wait(MODEL_POLL_S) and self.returncode is None:
            # A server that was told to stop ends its model itself, and no longer calls it ready.
            if not all(map(_lives, stubs)) and http_status(self._model_ready_url) == 200:
                self.model_died = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                return

    @property
    def _model_ready_url(self) -> str:
        return f"http://{self.http_url}/v2/models/{MODEL_NAME}/ready"

    def _wait_ready(self) -> None:
        """Until the model is ready and metrics are served, which Triton starts last."""
        assert self._process is not None
        timeout_s = self.options.ready_timeout_s
        deadline = time.monotonic() + timeout_s
        urls = [self._model_ready_url]
        if "--allow-metrics=false" not in self.options.arguments:
            urls.append(f"http://{self.metrics_url}/metrics")
        if all(wait_for(self._process, url, (200,), deadline - time.monotonic()) for url in urls):
            return
        code = self._process.returncode
        lost = re.search(r"Socket '(\S+)' already in use", self._log_text()) if code is not None else None
        if lost is not None:
            raise PortLostError(
                f"Triton server: {lost[1]} was taken by another program while the model loaded; start again, "
                "or pass another port (0 picks a free one)"
            )
        why = f"not ready after {timeout_s:g} s; its log ends"
        if code is not None:
            why = f"ended with code {code} before it was ready"
        raise ServerStartError(f"Triton server: {why}:\n{self.log_excerpt()}")

    def _log_text(self) -> str:
        if self._log is None or not self._log.is_file():
            return ""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode("utf-8", errors="replace")

    def log_excerpt(self, num_lines: int = 25) -> str:
        """Why the model did not load, if the log says so; else its end, without tables and GPU complaints."""
        text = self._log_text()
        reasons = re.findall(r"failed to load '\w+' version \d+: \w+: (?:TritonModelException: )?(.+)", text)
        if reasons:
            return "\n".join(reason.split("\\n\\nAt:")[0].rstrip('"').replace("\\n", "\n") for reason in reasons)
        harmless = re.compile(r"^[+|]|CUDA|Cuda|pinned memory|DCGM|NVML|^$")
        kept = [line for line in text.splitlines() if not harmless.search(line)]
        return "\n".join(kept[-num_lines:])

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The server's exit code, or None when it still runs after `timeout_s`."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float | None = None) -> None:
        """SIGTERM lets running turns finish within the grace period; then SIGKILL to the whole process group."""
        self._stopping.set()
        self._end(self.options.grace_s if grace_s is None else grace_s)

    def _end(self, grace_s: float) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self.wait(grace_s + KILL_AFTER_S if grace_s else 2.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for region in Path("/dev/shm").glob(f"{self._prefix}*") if self._prefix else ():
            region.unlink(missing_ok=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        """Where nobody handles SIGTERM, it ends the block like Ctrl-C from now on: the server would outlive us."""
        unhandled = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if unhandled and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _open_log(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"log: cannot write {path} ({error.strerror}); choose another file") from error


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def http_status(url: str) -> int | None:
    """Of a GET; None when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def wait_for(process: subprocess.Popen[bytes], url: str, statuses: Sequence[int], timeout_s: float) -> bool:
    """Until a GET of `url` has one of `statuses`. False: the process ended first, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if http_status(url) in statuses:
            return True
        time.sleep(POLL_S)
    return False
