"""The examples of the guide of `hpctrain check`, as files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "check.md"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUOTE = re.compile(r"(?:^> ?.*\n?)+", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Example:
    """heading: of its section. language: `python` for a task, `diff` for a change of the loop. quote: what
    the guide says that the check prints, as one line."""

    heading: str
    language: str
    text: str
    quote: str


def blocks(language: str) -> list[str]:
    """Returns the texts of the guide's blocks of a language, in order."""
    return [text for found, text in _FENCE.findall(GUIDE.read_text()) if found == language]


def examples() -> Iterator[Example]:
    """Yields the examples of the section on causes."""
    for section in GUIDE.read_text().split("\n### ")[1:]:
        heading, _, body = section.partition("\n")
        for found in _FENCE.finditer(body):
            quote = _QUOTE.search(body, found.end())
            assert quote is not None, heading
            said = " ".join(line.removeprefix(">").strip() for line in quote.group().splitlines())
            yield Example(heading=heading, language=found[1], text=found[2], quote=" ".join(said.split()))


def changed(script: str, difference: str) -> str:
    """Returns the script with a change of the guide, each part of which stands between lines of `@@`."""
    for part in difference.split("@@\n"):
        lines = part.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -" and line.strip())
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def write_examples(where: Path) -> dict[str, Example]:
    """Writes each example: recipes as NAME.toml with a task in NAME.py, loops as loop_NAME.py. Returns them by NAME."""
    sound_loop, sound_task, *_ = blocks("python")
    (recipe,) = blocks("toml")
    (where / "sound.py").write_text(sound_task)
    found = {}
    for number, example in enumerate(examples()):
        words = re.sub(r"\W+", "_", example.heading.lower())
        name = f"e{number:02}_{words}"
        found[name] = example
        if example.language == "diff":
            (where / f"loop_{name}.py").write_text(changed(sound_loop, example.text))
        else:
            (where / f"{name}.py").write_text("from sound import *\n\n\n" + example.text)
            (where / f"{name}.toml").write_text(recipe.replace("faulty:Task", f"{name}:Task"))
    return found
