"""One library in a process of its own: it reads a line of JSON with texts' lengths, and answers with times.

    PYTHONPATH=. python -m benchmarks.encoders.worker LIBRARY FOLDER FILES PRECISION

A line is {"lengths": [...], "seed": 1, "runs": 3}; the answer {"seconds": [...], "vectors": [[...], ...]}, with the
vectors of the last run. Ids are random words, the same for every library. The first line is printed once it is ready.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from benchmarks.encoders.libraries import LIBRARIES

_FIRST_WORD, _LAST_WORD = 2000, 25000


def ids_of(lengths: list[int], seed: int) -> list[list[int]]:
    """Ids of ordinary words in the vocabularies of BERT, and of XLM-RoBERTa, as all text lies between 0 and 2."""
    draw = random.Random(seed)
    return [[101, *(draw.randrange(_FIRST_WORD, _LAST_WORD) for _ in range(length - 2)), 102] for length in lengths]


def main() -> None:
    name, folder, files, precision = sys.argv[1:5]
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print
    encode = LIBRARIES[name](Path(folder), Path(files), precision)
    encode(ids_of([8], 1))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids, seconds = ids_of(asked["lengths"], asked["seed"]), []
        for _ in range(asked["runs"]):
            start_s = time.perf_counter()
            vectors = encode(ids)
            seconds.append(time.perf_counter() - start_s)
        print(json.dumps({"seconds": seconds, "vectors": vectors.tolist()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
