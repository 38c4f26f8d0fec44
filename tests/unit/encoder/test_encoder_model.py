from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from router.encoder import files
from router.encoder.errors import EncoderFilesError, EncoderModelError, ItemError
from router.encoder.model import DualEncoder
from router.encoder.text import MeanPoolingHead, Tokens

TinyClip = Callable[..., Path]


def test_a_picture_is_nearest_to_what_describes_it(starter: DualEncoder, photographs: dict[str, bytes]) -> None:
    descriptions = {
        "cat": "photographs of cats, dogs and other animals",
        "rocket": "photographs of vehicles: cars, trucks and rockets",
        "temple": "photographs of buildings: houses, temples, palaces",
        "flower": "photographs of flowers and plants",
    }
    texts = starter.encode_texts(list(descriptions.values()))
    images = starter.encode_images([photographs[name] for name in descriptions])

    assert [list(descriptions)[row] for row in (images @ texts.T).argmax(axis=1)] == list(descriptions)


def test_a_text_is_nearest_to_what_it_is_about(starter: DualEncoder) -> None:
    services = starter.encode_texts(["translation between languages", "cooking recipes", "legal contracts and law"])
    queries = starter.encode_texts(
        ["how do I say good morning in French?", "how long does bread bake?", "is my lease valid?"]
    )

    assert (queries @ services.T).argmax(axis=1).tolist() == [0, 1, 2]


def test_rows_are_float32_of_unit_length(starter: DualEncoder, cat: bytes) -> None:
    rows = np.concatenate([starter.encode_texts(["a", "a cat " * 40]), starter.encode_images([cat])])

    assert rows.dtype == np.float32
    assert rows.shape == (3, starter.dimension) == (3, 512)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert starter.encode_texts([]).shape == (0, 512)


def test_a_vector_depends_on_its_item_alone(starter: DualEncoder, cat: bytes, photographs: dict[str, bytes]) -> None:
    texts = ["a cat", "a much longer text about something else entirely, " * 5, "one of the same", "a cat"]

    together = starter.encode_texts(texts)

    for row, text in zip(together, texts, strict=True):
        assert row.tobytes() == starter.encode_texts([text])[0].tobytes()
    images = starter.encode_images([photographs["flower"], cat])
    assert images[1].tobytes() == starter.encode_images([cat])[0].tobytes()


def test_two_loads_give_equal_bytes(starter: DualEncoder, cat: bytes) -> None:
    other = DualEncoder.load(threads=2)
    assert other.fingerprint == starter.fingerprint
    np.testing.assert_allclose(other.encode_texts(["a cat"]), starter.encode_texts(["a cat"]), atol=1e-5)
    same = DualEncoder.load()
    assert same.encode_texts(["a cat"]).tobytes() == starter.encode_texts(["a cat"]).tobytes()
    assert same.encode_images([cat]).tobytes() == starter.encode_images([cat]).tobytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" \t\n\u3000", "empty"),
        ("\0", "nothing that the encoder knows"),
        ("\u200b\u200d\ufeff", "nothing that the encoder knows"),
        ("\U0001f600\U0001f680", "nothing that the encoder knows"),
        ("\ud83d", "not valid Unicode"),
        ("مرحبا بالعالم", "script"),
        ("שלום עולם", "script"),
        ("кошка спит на диване", "script"),
        ("猫が寝ている", "script"),
    ],
)
def test_a_text_without_meaning_is_an_error_and_no_vector(starter: DualEncoder, text: str, message: str) -> None:
    with pytest.raises(ItemError, match=message) as raised:
        starter.encode_texts(["a cat", text])
    assert raised.value.item == 1


@pytest.mark.parametrize(
    "text",
    [
        "a cat \U0001f600",
        "a\0cat",
        "translate «привет мир» into English",
        "1 + 2 = 3",
        "\u202ea cat\u202c",
        "Ein Foto einer Katze",
        "z" * 10_000,
    ],
)
def test_an_unusual_text_has_a_vector(starter: DualEncoder, text: str) -> None:
    if text.startswith("zz"):  # one word of more than 100 letters is unknown to MiniLM's tokenizer
        text += " cat"
        with pytest.raises(ItemError, match="nothing that the encoder knows"):
            starter.encode_texts([text[:10_000]])
    assert np.isfinite(starter.encode_texts([text])).all()


def test_a_long_text_is_cut(starter: DualEncoder) -> None:
    text = "the cat sat on the mat and looked at the dog " * 100
    rows = starter.encode_texts([text, text + " and then rockets" * 1000, "rockets " + text])

    assert starter.max_tokens == 256
    assert rows[0].tobytes() == rows[1].tobytes()
    assert rows[0].tobytes() != rows[2].tobytes()


def test_of_a_huge_text_only_the_beginning_is_looked_at(starter: DualEncoder) -> None:
    apart = "a cat" + " " * 64 * starter.max_tokens + "on a rocket"
    assert starter.encode_texts([apart]).tobytes() == starter.encode_texts(["a cat"]).tobytes()


def test_a_picture_that_cannot_be_decoded_is_named(starter: DualEncoder, cat: bytes) -> None:
    with pytest.raises(ItemError, match="can't be decoded") as raised:
        starter.encode_images([cat, cat, cat[:5000]])
    assert raised.value.item == 2


def test_the_limit_of_pixels_is_passed_on(cat: bytes, tiny_clip: TinyClip) -> None:
    with pytest.raises(ItemError, match="more than 1000"):
        DualEncoder.load(tiny_clip(), max_pixels=1000).encode_images([cat])


def test_mean_pooling_leaves_padding_out(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    mean, projection = random.normal(size=4), random.normal(size=(4, 6))
    np.savez(tmp_path / "head.npz", mean=mean, projection=projection)
    head = MeanPoolingHead(tmp_path / "head.npz")
    tokens = random.normal(size=(2, 5, 4)).astype(np.float32)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])

    rows = head(tokens, mask)

    for row, part in zip(rows, (tokens[0, :3], tokens[1]), strict=True):
        sentence = part.mean(axis=0)
        np.testing.assert_allclose(row, (sentence / np.linalg.norm(sentence) - mean) @ projection, rtol=1e-4, atol=1e-5)


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "head.npz", mean=np.zeros(3), projection=np.zeros((4, 6)))
    with pytest.raises(EncoderFilesError, match="do not fit"):
        MeanPoolingHead(tmp_path / "head.npz")
    (tmp_path / "head.npz").write_bytes(b"nothing")
    with pytest.raises(EncoderFilesError, match="does not hold"):
        MeanPoolingHead(tmp_path / "head.npz")


def test_the_tokenizers_own_padding_is_set_aside(tiny_clip: TinyClip) -> None:
    path = tiny_clip() / "tokenizer.json"
    assert len(Tokenizer.from_file(str(path)).encode("a cat").ids) == 20  # as the file has it

    tokens = Tokens(path, max_tokens=5)

    assert tokens.ids("a cat") == [2, 4, 7, 3]
    assert tokens.ids("a photo of a cat") == [2, 4, 5, 6, 3]  # the end token stays
    assert tokens.pad([2, 3], 4) == [2, 3, 0, 0]


@pytest.mark.parametrize("folder", ["", "onnx"])
def test_a_clip_export_is_loaded(tiny_clip: TinyClip, folder: str, cat: bytes) -> None:
    directory = tiny_clip("clip-vit-tiny", folder=folder)
    encoder = DualEncoder.load(directory)

    assert (encoder.name, encoder.note, encoder.dimension, encoder.max_tokens) == ("clip-vit-tiny", "", 6, 77)
    assert encoder.fingerprint == files.find(directory).fingerprint
    texts, images = encoder.encode_texts(["a photo of a cat", "red car"]), encoder.encode_images([cat])
    assert texts.shape == (2, 6)
    assert images.shape == (1, 6)
    # The tiny tower adds the rows of the tokens; its table is made as in the fixture.
    table = np.random.default_rng(7).normal(size=(11, 6)).astype(np.float32)
    expected = table[[2, 9, 10, 3]].sum(axis=0)
    np.testing.assert_allclose(texts[1], expected / np.linalg.norm(expected), atol=1e-5)


def test_all_shapes_of_a_text_tower_give_the_same_vectors(tiny_clip: TinyClip) -> None:
    texts = ["a photo of a cat", "red car"]
    expected = DualEncoder.load(tiny_clip("plain")).encode_texts(texts)
    int32, fixed, single, external = 6, 12, 1, "weights.bin"

    for directory in (
        tiny_clip("int32", ids=int32),
        tiny_clip("fixed", length=fixed),
        tiny_clip("single", batch=single),
        tiny_clip("external", external=external),
    ):
        encoder = DualEncoder.load(directory)
        np.testing.assert_allclose(encoder.encode_texts(texts), expected, atol=1e-6)
        assert encoder.max_tokens == (12 if directory.name == "fixed" else 77)


def test_towers_of_different_dimensions_are_refused(tiny_clip: TinyClip) -> None:
    with pytest.raises(EncoderModelError, match="text 6, image 5"):
        DualEncoder.load(tiny_clip(image_dimension=5))


def test_a_model_without_the_output_is_refused(tiny_clip: TinyClip) -> None:
    with pytest.raises(EncoderModelError, match=r"last_hidden_state; text_embeds is missing"):
        DualEncoder.load(tiny_clip(text_output="last_hidden_state"))


def test_a_fixed_batch_is_refused(tiny_clip: TinyClip) -> None:
    with pytest.raises(EncoderModelError, match="fixed batch of 8"):
        DualEncoder.load(tiny_clip(batch=8))


def test_a_model_that_is_none_is_refused(tiny_clip: TinyClip) -> None:
    directory = tiny_clip()
    (directory / "text_model.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(EncoderModelError, match="can't be loaded"):
        DualEncoder.load(directory)


def test_pictures_of_another_shape_than_the_tower_takes_are_refused(tiny_clip: TinyClip) -> None:
    directory = tiny_clip()
    config = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "preprocessor_config.json").write_text(json.dumps(config | {"crop_size": 16, "size": 16}))
    with pytest.raises(EncoderModelError, match="vision_model"):
        DualEncoder.load(directory)


def test_a_description_that_contradicts_the_models_is_refused(tmp_path: Path) -> None:
    for path in files.STARTER.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((files.STARTER / "encoder.json").read_text())
    (tmp_path / "encoder.json").unlink()
    (tmp_path / "encoder.json").write_text(json.dumps(config | {"dimension": 384}))
    with pytest.raises(EncoderModelError, match="384"):
        DualEncoder.load(tmp_path)


def test_a_zero_vector_is_an_error(tiny_clip: TinyClip) -> None:
    directory = tiny_clip()
    config = json.loads((directory / "preprocessor_config.json").read_text())
    # Black without normalisation is all zeros, and so is its product with any matrix.
    (directory / "preprocessor_config.json").write_text(json.dumps(config | {"do_normalize": False}))
    encoder = DualEncoder.load(directory)
    black = (
        b"BM"
        + bytes([58, 0, 0, 0, 0, 0, 0, 0, 54, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 24, 0])
        + bytes(28)
    )
    with pytest.raises(ItemError, match="no direction"):
        encoder.encode_images([black])
