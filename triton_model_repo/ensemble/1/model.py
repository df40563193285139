"""Triton's side of the model `ensemble`: passes requests on to `tensorrt_llm` by other names, and its answers back.

A thread per request waits for the answers; one more asks, a few times a second, which clients have gone away, and
stops their turns: Triton's own ensembles would let them run to their end.
"""

import sys
import threading
import uuid
from pathlib import Path

import triton_python_backend_utils as pb_utils

REPO_ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPO_ROOT))

from runtime.errors import RequestError  # noqa: E402
from runtime.serving.older_names import (  # noqa: E402
    INPUTS,
    OUTPUTS,
    newer_outputs,
    older_message,
    older_output,
    older_shape,
    to_newer,
)
from runtime.serving.tensors import InputTensor  # noqa: E402
from triton_model_repo.triton_tensors import (  # noqa: E402
    FINAL,
    make_tensor,
    printable,
    read_inputs,
    read_parameters,
)

TARGET = "tensorrt_llm"
# Only the last response of a turn tells its memory.
IN_LAST = "kv_bytes"
NEWER_OUTPUTS = [*newer_outputs(), IN_LAST]
CANCEL_POLL_S = 0.05


class TritonPythonModel:
    """Keeps the requests that are under way."""

    def initialize(self, args):
        self._relays = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ensemble-cancel", daemon=True)
        self._watcher.start()

    def execute(self, requests):
        for request in requests:
            relay = _Relay(request.get_response_sender(), _ours(read_parameters(request)))
            try:
                tensors = to_newer(read_inputs(request, INPUTS, batch=True))
            except RequestError as error:
                relay.fail(pb_utils.TritonError.INVALID_ARG, str(error))
                continue
            with self._lock:
                self._relays.add(relay)
            threading.Thread(target=self._run, args=(relay, tensors), name="ensemble-relay", daemon=True).start()

    def _run(self, relay, tensors):
        try:
            relay.run(tensors)
        except Exception as error:
            pb_utils.Logger.log_error(f"ensemble: {type(error).__name__}: {error}")
            relay.fail(pb_utils.TritonError.INTERNAL, f"internal error: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._relays.discard(relay)

    def _watch(self):
        while not self._closing.wait(CANCEL_POLL_S):
            with self._lock:
                relays = list(self._relays)
            for relay in relays:
                relay.stop_if_left()

    def finalize(self):
        self._closing.set()
        self._watcher.join()


def _ours(parameters):
    """The parameters that mean something to the other model; not every kind of value can be passed on."""
    return {key: str(value) for key, value in parameters.items() if key.lower().startswith("commitkv")}


class _Relay:
    """One request. `lock` keeps the question for cancellation and the last response apart: asking about a request
    that was freed with its last response kills the server."""

    def __init__(self, sender, parameters):
        self._sender = sender
        self._parameters = parameters
        self._id = f"ensemble-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._answered = False

    def run(self, tensors):
        """Sends every response on; the last one, or an error, completes the request."""
        for response in self._ask(tensors, NEWER_OUTPUTS):
            if response.has_error():
                self.fail(response.error().code(), older_message(response.error().message()))
                continue
            outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if not outputs:  # says only that all have come
                continue
            with self._lock:
                self._answered = IN_LAST in outputs
                flags = FINAL if self._answered else 0
                self._sender.send(pb_utils.InferenceResponse(output_tensors=_older(outputs)), flags=flags)
        self.fail(pb_utils.TritonError.INTERNAL, f"{TARGET} ended the request without an answer")

    def fail(self, code, message):
        with self._lock:
            if self._answered:
                return
            self._answered = True
            error = pb_utils.TritonError(printable(message), code)
            self._sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), flags=FINAL)

    def stop_if_left(self):
        """Cancels the turn of a client that has gone; it may not have begun, so this is asked again until it ends."""
        with self._lock:
            if self._answered or not self._sender.is_cancelled():
                return
        for _ in self._ask([InputTensor("stop", "BOOL", (1,), [True])], ["text_output"]):
            pass

    def _ask(self, tensors, outputs):
        request = pb_utils.InferenceRequest(
            model_name=TARGET,
            request_id=self._id,
            requested_output_names=outputs,
            inputs=[make_tensor(t.name, t.dtype, t.values, t.shape) for t in tensors],
            parameters=self._parameters,
        )
        return request.exec(decoupled=True)


def _older(outputs):
    """By older names; what had none is left out."""
    found = []
    for newer, values in outputs.items():
        name = older_output(newer)
        if name is not None:
            found.append(make_tensor(name, OUTPUTS[name], values, older_shape(name, values.size)))
    return found
