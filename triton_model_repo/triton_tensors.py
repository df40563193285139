"""Triton's tensors to plain values and back, for every model of this repository."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from runtime.serving.tensors import InputTensor

DTYPE_NAMES = {
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int64): "INT64",
    np.dtype(np.uint64): "UINT64",
    np.dtype(np.float32): "FP32",
    np.dtype(np.object_): "STRING",
}
NUMPY_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read_inputs(request, names, batch=False):
    """The tensors of a request that are there. batch: their first dimension, of size 1, is left out."""
    found = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in names)
    return [_read(name, tensor.as_numpy(), batch) for name, tensor in found if tensor is not None]


def _read(name, array, batch):
    dtype = DTYPE_NAMES.get(array.dtype, str(array.dtype))
    return InputTensor(name, dtype, tuple(array.shape[1:] if batch else array.shape), array.reshape(-1).tolist())


def read_parameters(request):
    """The request's own parameters, forwarded headers among them."""
    text = request.parameters()
    return json.loads(text) if text else {}


def make_tensor(name, dtype, values, shape=None):
    """A tensor of Triton; flat without a shape."""
    array = np.array(values, dtype=NUMPY_DTYPES[dtype])
    return pb_utils.Tensor(name, array if shape is None else array.reshape(shape))


def printable(text):
    """Text with surrogates for bytes that are not UTF-8, as one that can be sent."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
