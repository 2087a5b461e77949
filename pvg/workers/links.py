"""TCP connections from other machines to the driver. Each begins with a proof that the caller knows the run's secret.

    key = await admitted(reader, writer, secret)        # the driver: which expected connection this is
    connection = connect(host, port, secret, key)       # the other machine

The driver sends a random challenge. The caller answers with its key and an HMAC of both. So the secret is never sent,
and an answer is worth nothing in another connection. What follows is not encrypted.

The trainer's ranks also connect to each other. They use the network by which they reach the driver.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct

import psutil

from pvg.errors import MissingRequirementError

CHALLENGE_BYTES = 32
SECRET_BYTES = 32
KEY = struct.Struct("<Q")
DIGEST = "sha256"
DIGEST_BYTES = 32
CONNECT_S = 20.0
LOOPBACK = "127.0.0.1"


async def admitted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> int:
    """The key of a caller that knows the secret. Raises ConnectionError for any other caller, and TimeoutError."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    writer.write(challenge)
    async with asyncio.timeout(CONNECT_S):
        try:
            answer = await reader.readexactly(KEY.size + DIGEST_BYTES)
        except asyncio.IncompleteReadError:
            raise ConnectionError("the caller has left") from None
    key, proof = answer[: KEY.size], answer[KEY.size :]
    if not hmac.compare_digest(proof, hmac.digest(secret, challenge + key, DIGEST)):
        raise ConnectionError("the caller does not know the secret")
    return int(KEY.unpack(key)[0])


def connect(host: str, port: int, secret: bytes, key: int) -> socket.socket:
    """Connect to the driver. Blocks. Raises OSError."""
    connection = socket.create_connection((host, port), timeout=CONNECT_S)
    try:
        challenge = b""
        while len(challenge) < CHALLENGE_BYTES:
            part = connection.recv(CHALLENGE_BYTES - len(challenge))
            if not part:
                raise ConnectionError("the driver has closed the connection")
            challenge += part
        number = KEY.pack(key)
        connection.sendall(number + hmac.digest(secret, challenge + number, DIGEST))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def notice_broken(connection: socket.socket, after_s: float) -> None:
    """Let a connection end if the other machine has not confirmed sent bytes for so long. Otherwise it would take
    about 15 minutes. Does nothing on systems other than Linux."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(after_s * 1e3))


def own_address(writer: asyncio.StreamWriter) -> str:
    """This machine's address in a connection: LOOPBACK if the other side is a process here, as for local workers."""
    name = writer.get_extra_info("sockname")
    return str(name[0]) if isinstance(name, tuple) else LOOPBACK


def interface_of(address: str) -> str:
    """The name of this machine's network interface with an IP address. Raises MissingRequirementError if it has
    none."""
    wanted = LOOPBACK if address.startswith("127.") else address
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == wanted for entry in found):
            return str(name)
    raise MissingRequirementError(
        f"No network interface of this machine has the address {address}.",
        "Start Ray on it with an address that it has: ray start --node-ip-address ADDRESS",
    )
