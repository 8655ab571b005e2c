"""Steps of another process, in turns with ours."""

import sys
from pathlib import Path

import pytest

from recipes.bench import _peer
from recipes.bench._peer import Peer, beside_peer
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig

# Takes the sizes that it is given, as the real one does, and answers each line.
ANSWERS = """
import sys
*sizes, mode = sys.argv[1:]
print(sum(map(int, sizes)), "0.3.5", mode, flush=True)
for line in sys.stdin:
    print(0.25, flush=True)
"""
ENDS = """
print(7, "0.3.5", "2.0", flush=True)
input()
raise SystemExit(3)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "step.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_it_answers_each_step(tmp_path: Path) -> None:
    with Peer([sys.executable, str(script(tmp_path, ANSWERS)), "1", "2", "eager"]) as peer:
        assert (peer.parameters, peer.versions) == (3, ["0.3.5", "eager"])
        assert [peer.step(), peer.step()] == [0.25, 0.25]
    assert peer.process.returncode == 0


def test_an_interpreter_without_the_library_is_named() -> None:
    with pytest.raises(RecipeError, match=r"--peer: .*exit code 1.*pip install torch unit-scaling"):
        Peer([sys.executable, "-c", "import a_library_that_is_not_here"])


def test_a_process_that_ends_between_steps_is_an_error(tmp_path: Path) -> None:
    ends = Peer([sys.executable, str(script(tmp_path, ENDS))])
    with ends as peer, pytest.raises(RecipeError, match="exit code 3"):
        peer.step()


def test_both_steps_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_peer, "SCRIPT", script(tmp_path, ANSWERS))
    shape = {"width": 8, "layers": 1, "heads": 2, "mlp": "gated"}
    config = GPTConfig.model_validate(
        {"name": "peer", "model": shape, "data": {"batch_size": 2, "sequence_length": 4}}
    )
    table = beside_peer(sys.executable, config, 4)
    assert [row["step"].split()[-1] for row in table.rows] == ["compiled", "eager"]
    # The MLP's 3 * 8 * 32, attention's 4 * 8 * 8, three norms, the table and the readout.
    assert table.rows[0]["ours"] == 768 + 256 + 3 * 8 + 2 * 256 * 8
    assert table.rows[0]["asked"] == "<= 0.9"
    assert "asked" not in table.rows[1]
