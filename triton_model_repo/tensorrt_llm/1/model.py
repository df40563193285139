"""Triton's side of the model `tensorrt_llm`: converts tensors, hands requests to `runtime.serving`, nothing else."""

import json
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path

import triton_python_backend_utils as pb_utils

REPO_ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPO_ROOT))

from runtime.config import RuntimeConfig  # noqa: E402
from runtime.errors import CommitKVError, ConfigError  # noqa: E402
from runtime.loop import EngineLoop  # noqa: E402
from runtime.serving.contract import INPUTS  # noqa: E402
from runtime.serving.turns import Turns  # noqa: E402
from runtime.wiring import load_engine, resolve_policy  # noqa: E402
from triton_model_repo.triton_tensors import (  # noqa: E402
    FINAL,
    make_tensor,
    printable,
    read_inputs,
    read_parameters,
)

OWN_PARAMETERS = ("engine_dir", "default_policy", "grace_s")


class TritonPythonModel:
    """One engine, one instance. Model parameters: see config.pbtxt."""

    def initialize(self, args):
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            self._grace_s = float(parameters.get("grace_s", "30"))
            engine_dir = _path(parameters.get("engine_dir")) or REPO_ROOT / "engines" / "smollm2-135m"
            default_policy = parameters.get("default_policy") or None
            engine = load_engine(engine_dir, _runtime_config(parameters))
            if default_policy:
                default_policy = resolve_policy(str(_path(default_policy)), engine_dir)
            log = pb_utils.Logger.log_warn
            self._turns = Turns(EngineLoop(engine), default_policy, log)
        except CommitKVError as error:
            raise pb_utils.TritonModelException(printable(str(error))) from None

    def execute(self, requests):
        for request in requests:
            sink = _Sink(request)
            try:
                self._turns.handle(read_inputs(request, INPUTS), request.request_id(), sink, read_parameters(request))
            except Exception as error:
                pb_utils.Logger.log_error(f"request {request.request_id()!r}: {type(error).__name__}: {error}")
                sink.fail("INTERNAL", f"internal error: {type(error).__name__}: {error}")

    def finalize(self):
        if hasattr(self, "_turns"):
            self._turns.close(self._grace_s)


def _path(text):
    """The stub runs Python isolated, with ASCII file names: other bytes travel as surrogates."""
    return Path(os.fsdecode(text.encode("utf-8"))) if text else None


def _runtime_config(parameters):
    """RuntimeConfig from the model parameters of the same names. Raises ConfigError."""
    kinds = {field.name: type(field.default) for field in fields(RuntimeConfig)}
    values = {}
    for key, text in parameters.items():
        if key in OWN_PARAMETERS:
            continue
        if key not in kinds:
            known = ", ".join((*OWN_PARAMETERS, *kinds))
            raise ConfigError(f"model parameter {key}: unknown, expected one of {known}; correct config.pbtxt")
        try:
            values[key] = kinds[key](text)
        except ValueError:
            raise ConfigError(f"model parameter {key}: got {text!r}, expected a number; correct config.pbtxt") from None
    return RuntimeConfig(**values)


class _Sink:
    """The response side of one request (`runtime.serving.turns.Sink`)."""

    def __init__(self, request):
        self._sender = request.get_response_sender()

    def send(self, outputs, final):
        tensors = [make_tensor(o.name, o.dtype, o.values) for o in outputs]
        self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=FINAL if final else 0)

    def fail(self, code, message):
        error = pb_utils.TritonError(printable(message), getattr(pb_utils.TritonError, code))
        self._sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), flags=FINAL)

    def is_cancelled(self):
        return self._sender.is_cancelled()
