"""Conversation ids that only this server hands out: signed with a secret, so that a guessed or stolen one is no use.

    id = nonce "." HMAC-SHA256(salt, length of tenant | tenant | nonce), cut to 128 bits      (RFC 2104)

The tenant is signed with it: an id that leaks to another tenant is refused like one that was never drawn. Servers that
share the salt accept each other's ids, so that a conversation can move between replicas. Nothing is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from pathlib import Path

from runtime.errors import ConfigError, UnknownConversationError

LEAST_SALT_BYTES = 16
SIGNATURE_BYTES = 16
NONCE_BYTES = 16


class SignedIds:
    """`runtime.serving.turns.Ids` that know their own."""

    def __init__(self, salt: bytes) -> None:
        assert len(salt) >= LEAST_SALT_BYTES
        self._salt = salt

    def new_id(self, tenant: str) -> str:
        """44 characters or so of A-Z a-z 0-9 - _ and one dot."""
        nonce = secrets.token_urlsafe(NONCE_BYTES)
        return f"{nonce}.{self._signature(tenant, nonce)}"

    def check(self, tenant: str, conversation_id: str) -> None:
        """Raises UnknownConversationError for an id that was not drawn for this tenant with this salt."""
        nonce, _, signature = conversation_id.rpartition(".")
        expected = self._signature(tenant, nonce)
        # Bytes: the comparison takes text of ASCII only, and a client may send any.
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            raise UnknownConversationError(
                f"conversation_id: got {conversation_id!r}, expected one that this server gave out to this tenant; "
                f"send an empty conversation_id to get one"
            )

    def _signature(self, tenant: str, nonce: str) -> str:
        name = tenant.encode()
        message = len(name).to_bytes(8, "big") + name + nonce.encode()
        digest = hmac.new(self._salt, message, hashlib.sha256).digest()[:SIGNATURE_BYTES]
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def read_salt(path: Path) -> bytes:
    """The secret in a file, white space at its ends left out. Raises ConfigError if it cannot be read or is short."""
    try:
        salt = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"id_salt_file: {path} cannot be read ({error.strerror}), expected a file with a secret of at least "
            f"{LEAST_SALT_BYTES} bytes; make one with `openssl rand -hex 32`"
        ) from error
    if len(salt) < LEAST_SALT_BYTES:
        raise ConfigError(
            f"id_salt_file: {path} holds {len(salt)} bytes, expected at least {LEAST_SALT_BYTES}; make one with "
            f"`openssl rand -hex 32`"
        )
    return salt
