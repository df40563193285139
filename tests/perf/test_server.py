from pathlib import Path

import pytest

from perf import chat, demo, many, serve
from perf.serve import server_options
from perf.server import (
    REPO_ROOT,
    ServerOptions,
    ServerStartError,
    TritonInstall,
    check_numpy,
    find_triton,
    link_backend,
    write_repository,
)
from runtime.errors import ConfigError

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def test_the_repository_copy_carries_the_parameters(tmp_path: Path) -> None:
    parameters = {"engine_dir": '/a "quoted" \\ päth', "kv_memory_bytes": "17"}
    repository = write_repository(ServerOptions(parameters=parameters), tmp_path)
    config = (repository / "tensorrt_llm" / "config.pbtxt").read_text(encoding="utf-8")
    original = (REPO_ROOT / "triton_model_repo" / "tensorrt_llm" / "config.pbtxt").read_text(encoding="utf-8")
    assert config.startswith(original)
    assert 'string_value: "/a \\042quoted\\042 \\134 p\\303\\244th"' in config
    assert 'key: "kv_memory_bytes" value { string_value: "17" }' in config
    assert (repository / "tensorrt_llm" / "1" / "model.py").resolve().parents[3] == REPO_ROOT


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        write_repository(ServerOptions(model_repository=tmp_path), tmp_path)


def test_the_backend_links_the_stub_of_this_python(tmp_path: Path) -> None:
    backends = link_backend(find_triton(), tmp_path)
    names = {path.name for path in (backends / "python").iterdir() if path.exists()}
    assert {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"} <= names


def test_a_wheel_without_a_stub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="stub"):
        link_backend(TritonInstall(tmp_path / "tritonserver", tmp_path), tmp_path)


def test_numpy_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_numpy()
    monkeypatch.setattr("numpy.__version__", "2.1.0")
    with pytest.raises(ServerStartError, match=r"numpy: got 2\.1\.0"):
        check_numpy()


@pytest.mark.parametrize(
    ("engine", "kv_mib", "threads", "part"),
    [("none", 1, 0, "--engine"), (".", 0, 0, "--kv-mib"), (".", 1, -1, "--threads")],
)
def test_options_are_checked_before_a_start(tmp_path: Path, engine: str, kv_mib: int, threads: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        server_options(tmp_path / engine, kv_mib, threads)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (serve.main, ["--engine", "/nowhere"]),
        (serve.main, ["--engine", ".", "--grace-s", "nan"]),
        (serve.main, ["--engine", ".", "--grace-s", "inf"]),
        (serve.main, [*ANY_PORTS, "--engine", ".", "--log", "/proc/none/server.log"]),
        (chat.main, ["--serve", "--engine", "/nowhere"]),
        (chat.main, ["--url", "127.0.0.1:1"]),
        (demo.main, ["--engine", "/nowhere"]),
        (demo.main, ["--conversation", "/nowhere.jsonl"]),
        (demo.main, ["--think-s", "-1"]),
        (many.main, ["--conversations", "0"]),
        (many.main, ["--engine", "/nowhere"]),
    ],
)
def test_commands_end_with_one_line_and_no_traceback(
    main, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = [] if main in (serve.main, chat.main) else ["--output", str(tmp_path)]
    assert main([*arguments, *output]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
