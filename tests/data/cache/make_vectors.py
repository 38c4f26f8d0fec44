"""Makes mfcc.json and dhash.json: what librosa and imagehash say of sounds and pictures that anybody can make again.

Run by hand, once, in an environment of its own (neither library is needed by the project or its tests):

    python3 -m venv /tmp/vectors && /tmp/vectors/bin/pip install librosa==0.11.0 ImageHash==4.3.2
    /tmp/vectors/bin/python -m tests.data.cache.make_vectors
"""

from __future__ import annotations

import json
from pathlib import Path

import imagehash  # type: ignore[import-not-found]
import librosa  # type: ignore[import-not-found]
import numpy as np

from tests.data.cache.samples import RATE, pictures, sounds

HERE = Path(__file__).resolve().parent


def main() -> None:
    mfcc = {}
    for name, samples in sounds().items():
        mfcc[name] = {
            kind.__name__: [
                float(v) for v in librosa.feature.mfcc(y=samples.astype(kind), sr=RATE, n_mfcc=13).mean(axis=1)
            ]
            for kind in (np.float32, np.float64)
        }
    versions = {"librosa": librosa.__version__, "imagehash": imagehash.__version__}
    (HERE / "mfcc.json").write_text(json.dumps({"made_by": versions, "means": mfcc}, indent=1) + "\n")
    hashes = {name: str(imagehash.dhash(picture)) for name, picture in pictures().items()}
    (HERE / "dhash.json").write_text(json.dumps({"made_by": versions, "dhash": hashes}, indent=1) + "\n")
    filters = librosa.filters.mel(sr=RATE, n_fft=2048, n_mels=128, dtype=np.float64)
    rows = {str(row): [float(v) for v in filters[row][np.nonzero(filters[row])]] for row in (0, 1, 17, 64, 100, 127)}
    (HERE / "mel.json").write_text(json.dumps({"made_by": versions, "nonzero": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
