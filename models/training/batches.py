"""Batches of training sequences, made by worker processes that never touch JAX.

Batch `index` is a pure function of (seed, index, length, mixture): neither the number of workers nor a restart changes
it. Worker w makes the batches with index % workers == w in their order. A worker holds one finished batch in its pipe
until it is read and ends when its standard input closes, so nothing is left behind when training stops for any reason.

A request is one line of JSON on standard input; the answer is tokens (little-endian i16) and labels (u8), row by row.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import IO

import numpy as np

from models import tasks
from models.training import corpora


@dataclasses.dataclass(frozen=True)
class Request:
    """What one batch is made of."""

    index: int
    length: int
    rows: int
    mixture: tasks.Mixture
    stage: str = "dense"  # which the batch is for, see `recipes.Phase`


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Training sequences with the label of every byte."""

    request: Request
    tokens: np.ndarray  # i16[B, S]
    labels: np.ndarray  # u8[B, S]


class Maker:
    """Makes batches from the texts of one folder."""

    def __init__(self, folder: str | pathlib.Path, seed: int):
        texts = corpora.load(folder)
        self.sources = texts["kjv"].train, texts["jargon"].train
        self.words = tasks.common_words(self.sources[0])
        self.seed = seed

    def __call__(self, request: Request) -> Batch:
        """The batch of a request."""
        rng = np.random.default_rng((self.seed, request.index))
        tokens = np.empty((request.rows, request.length), "<i2")
        labels = np.empty((request.rows, request.length), np.uint8)
        for row in range(request.rows):
            tokens[row], labels[row] = tasks.training_sequence(
                rng, self.sources, self.words, request.length, request.mixture
            )
        return Batch(request, tokens, labels)


class Workers:
    """Worker processes, used as a context manager; with `count` 0 batches are made in place.

    `ask` requests in rising order of index without a gap, `take` gives the batches in that order.
    """

    def __init__(self, folder: str | pathlib.Path, seed: int, count: int):
        self.pending: list[Request] = []
        self.maker = Maker(folder, seed) if count == 0 else None
        command = [sys.executable, "-m", "models.training.batches", str(folder), str(seed)]
        root = str(pathlib.Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0)
            for _ in range(count)
        ]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def ask(self, request: Request) -> None:
        """Queue a request. Raises RuntimeError when the worker that should make it has ended."""
        self.pending.append(request)
        if self.processes:
            line = json.dumps(dataclasses.asdict(request)) + "\n"
            try:
                self._of(request)[0].write(line.encode())
            except OSError as error:
                raise RuntimeError("a worker that makes batches has ended; its message stands above") from error

    def take(self) -> Batch:
        """The next batch, in the order of the requests. Raises RuntimeError when a worker has ended."""
        request = self.pending.pop(0)
        if self.maker is not None:
            return self.maker(request)
        size = request.rows * request.length
        data = self._read(self._of(request)[1], 3 * size)
        shape = (request.rows, request.length)
        tokens = np.frombuffer(data, "<i2", size).reshape(shape)
        return Batch(request, tokens, np.frombuffer(data, np.uint8, size, offset=2 * size).reshape(shape))

    def close(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(OSError):  # a request that nobody will read
                    pipe.close()
            process.wait(timeout=10)
        self.processes = []

    def _of(self, request: Request) -> tuple[IO[bytes], IO[bytes]]:
        process = self.processes[request.index % len(self.processes)]
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    @staticmethod
    def _read(pipe: IO[bytes], size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = pipe.read(size - len(data))
            if not part:
                raise RuntimeError("a worker that makes batches has ended; its message stands above")
            data += part
        return bytes(data)


def work(folder: str, seed: int) -> None:
    """Answer requests until standard input ends."""
    make = Maker(folder, seed)
    for line in sys.stdin.buffer:
        fields = json.loads(line)
        mixture = fields.pop("mixture")
        batch = make(Request(**fields, mixture=tasks.Mixture(**mixture | {"kinds": tuple(mixture["kinds"])})))
        try:
            sys.stdout.buffer.write(batch.tokens.tobytes() + batch.labels.tobytes())
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # training has stopped; nothing to say


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
