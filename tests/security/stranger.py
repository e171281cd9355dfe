"""What another user of the machine tries against a running job. Returns what it achieved."""

from __future__ import annotations

import encodings.idna  # noqa: F401  the stranger may not be able to read Python's own files
import json
import os
import pickle
import selectors
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fabric.core.job_secret import JobSecret
from fabric.guard.handshake import _ANSWER, _proof

NOBODY = 65534
IS_ROOT = os.getuid() == 0


class Harm:
    """Unpickled, it makes a file as whoever unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def as_stranger(function, *arguments):
    """Call a function in a process of another user, who is in the files' group; without root: of this one."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            if IS_ROOT:
                os.setgroups([])
                os.setgid(os.getgid())
                os.setuid(NOBODY)
            told = function(*arguments)
        except BaseException as error:
            told = {"error": repr(error)}
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        told = json.loads(stream.read())
    os.waitpid(child, 0)
    return told


def attack_connections(port: int, folder: Path) -> dict:
    """Read the store, connect as rank 1 before it does, stay silent in many connections, forge a verdict."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    end = time.monotonic() + 60
    while not (found := [key for key in store.list_keys() if "/open " in key and key.endswith("/1/0")]):
        if time.monotonic() > end:
            return {"error": f"no group is opened: {store.list_keys()}"}
        time.sleep(0.05)
    key = found[0]
    mark, _, _, listens = store.get(key).decode().split(" ")
    base, name = key[: key.index("open ")], key[key.index("open ") :]
    guesses = [b"", mark.encode(), bytes.fromhex(mark)]
    for other in store.list_keys():
        if store.check([other]):
            with suppress(Exception):
                value = store.get(other)
                guesses += [value, value.partition(b" ")[0], bytes.fromhex(value.decode())]
    message = pickle.dumps(Harm(folder / "harm"))
    silent = [socket.create_connection(("127.0.0.1", int(listens))) for _ in range(150)]
    talking = {}
    for guess in {*guesses}:
        key = JobSecret(guess).proof(b"connections", name.rpartition("/")[0].encode(), listens.encode())
        talking[socket.create_connection(("127.0.0.1", int(listens)))] = key
    if not os.fork():  # rank zero sends its nonces once rank 1 is there
        head = struct.pack("<qq", len(message), len(message))
        _answer_all(talking, silent, head + message, folder / "answered")
        os._exit(0)
    for text in (json.dumps("ended by a stranger"), f"{mark} {json.dumps('ended by a stranger')}"):
        store.set(f"{base}verdict", text)
    _await_looks(store, f"{base}at/0")
    store.set(f"{base}at/1", json.dumps([1, "host", "exited", "", "by a stranger", None, {}]))
    (addresses,) = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if _listens(line, listens)
    ] or ["elsewhere"]
    leaked = any(["secret" in key for key in store.list_keys()])
    return {"guesses": len(guesses), "address": addresses, "secret": leaked}


def _await_looks(store: dist.Store, key: str) -> None:
    """Wait until rank zero has published its status twice: it reads verdicts then."""
    seen = set()
    end = time.monotonic() + 60
    while len(seen) < 3 and time.monotonic() < end:
        if store.check([key]):
            seen.add(store.get(key))
        time.sleep(0.05)
    if len(seen) < 3:
        raise TimeoutError("rank zero does not look")


def _answer_all(
    talking: dict[socket.socket, bytes], silent: list[socket.socket], message: bytes, done: Path
) -> None:
    """Answer each challenge by a guessed key, as rank 1, and send a message, until all are closed.

    Makes the file `done` once all challenges are answered: rank 1 connects after it.
    """
    unanswered = {*talking}
    kept = {one.fileno() for one in (*talking, *silent)}
    for descriptor in {*range(3, 1024)} - kept:
        with suppress(OSError):
            os.close(descriptor)
    selector = selectors.DefaultSelector()
    for one in talking:
        selector.register(one, selectors.EVENT_READ)
    while selector.get_map() and (ready := selector.select(120)):
        for one, *_ in ready:
            made = one.fileobj
            try:
                nonce = made.recv(32)
                if len(nonce) < 32:
                    raise ConnectionResetError
                answer = _ANSWER.pack(1, bytes(32), _proof(talking[made], b"connects", 1, nonce, bytes(32)))
                made.sendall(answer + message)
                unanswered.discard(made)
            except OSError:
                selector.unregister(made)
                unanswered.discard(made)
            if not unanswered:
                done.touch()


def _listens(line: str, port: str) -> bool:
    columns = line.split()
    return columns[1].endswith(f":{int(port):04X}") and columns[3] == "0A"


def attack_save(directory: Path, folder: Path) -> list[str]:
    """Put a pickle, and a pipe, where rank zero reads what rank 1 has written."""
    done = []
    for name in ("rank-1.told", "rank-0.told", "rank-1.writes", ".metadata"):
        with suppress(PermissionError):
            (directory / name).write_bytes(pickle.dumps(Harm(folder / "harm")))
            done.append(name)
    with suppress(PermissionError):
        os.mkfifo(directory / "pipe")
        done.append("pipe")
    with suppress(PermissionError):
        done += [file.name for file in directory.iterdir()]
    return done
