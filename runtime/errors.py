"""Errors a user can cause. Each message says what, what it got, what it expected, and how to fix it."""

from __future__ import annotations


class CommitKVError(Exception):
    """Base of every error that is answered to a user instead of crashing the process."""


class ConfigError(CommitKVError):
    """A limit, option or combination of options that cannot work."""


class CheckpointError(CommitKVError):
    """A model file or directory that is missing, damaged or of an unsupported kind."""


class ManifestError(CommitKVError):
    """An engine directory that is missing, damaged or built for something else."""


class RequestError(CommitKVError):
    """A request that can never be served as it stands."""


class UnknownPolicyError(RequestError):
    """A policy name that is not registered."""


class UnsupportedPolicyError(RequestError):
    """A policy that is registered but does not fit the model or the engine."""


class UnknownConversationError(RequestError):
    """A conversation id that the engine does not hold."""


class LostConversationError(UnknownConversationError):
    """A conversation whose checkpoint exists and cannot be used here."""


class ConversationBusyError(RequestError):
    """A second turn for a conversation whose turn is still running."""


class PromptTooLongError(RequestError):
    """More tokens than the engine's `max_seq_len` leaves room for."""


class TurnTooLargeError(RequestError):
    """A turn whose prompt and answer may need more KV memory than it can ever have."""


class OutOfMemoryError(CommitKVError):
    """The KV memory cannot hold what was asked for, even after everything reclaimable was reclaimed."""


class QueueFullError(OutOfMemoryError):
    """Too many turns wait already. retry_after_s: whole seconds after which a place may be free."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerStoppingError(CommitKVError):
    """The engine is shutting down and takes no new work."""


class StoreUnavailableError(CommitKVError):
    """The checkpoint store does not answer, so a conversation that may lie there cannot go on now."""


class DeviceError(CommitKVError):
    """A GPU, driver or library that is missing, too small, or of another kind than the engine was built for."""


class TableError(CommitKVError):
    """A table whose ids or lengths lie outside the arenas; nothing was launched."""


class BuildError(CommitKVError):
    """TensorRT built no engine from a network that should have given one."""
