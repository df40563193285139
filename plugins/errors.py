"""Errors of compiling and launching kernels. Each says what was wrong, what was expected, and how to put it right."""

from __future__ import annotations


class KernelError(Exception):
    """Base of all errors of this module."""


class MissingPackageError(KernelError):
    """A Python package that compiling or launching needs is not installed."""


class CompileError(KernelError):
    """The compiler refused a kernel; the message ends with its log."""


class UnsupportedSmError(KernelError):
    """No cubin is made for this GPU architecture."""


class DriverError(KernelError):
    """There is no NVIDIA driver or GPU, or a call of the driver failed."""


class LaunchError(KernelError, ValueError):
    """A launch was refused before it started: wrong sizes, misaligned pointers, tensors on the wrong device."""


class EmulationError(KernelError):
    """The CPU emulation stopped a launch: the message names kernel, block, thread and what went wrong."""


class UnsupportedShapeError(KernelError):
    """No kernel was written for this type or size; raised before anything is built."""


class PluginError(KernelError):
    """A TensorRT plugin was given fields, shapes or memory that it cannot work on; nothing was launched."""
