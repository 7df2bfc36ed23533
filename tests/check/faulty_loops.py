"""Loops of one's own, sound and each with one fault, for `session.check`. Run on ranks:
`python -m tests.check.faulty_loops NAME ...` prints a line of JSON for each."""

import json
import sys

import hpctrain
from tests.check import faulty_gradients, faulty_samples, faulty_state

# The cause that is to be found for each loop; None: it is sound.
CAUSES = {**faulty_gradients.CAUSES, **faulty_samples.CAUSES, **faulty_state.CAUSES}


def print_line(name, report):
    """Prints what the report of one check says, as a line of JSON."""
    causes = [finding.cause.name for finding in report.findings if finding.is_difference]
    line = {"name": name, "equal": report.equal, "causes": causes, "text": "\n".join(report.lines())}
    print(json.dumps(line), flush=True)


def main() -> None:
    loops = {loop.__name__: loop for loop in CAUSES}
    with hpctrain.init(timeout_s=300) as session:
        for name in sys.argv[1:]:
            report = session.check(loops[name], show=False)
            if session.rank == 0:
                print_line(name, report)


if __name__ == "__main__":
    main()
