"""How far a start has come, from vLLM's own log (lines of 0.32), and how busy a server is."""

from __future__ import annotations

from pathlib import Path

from pvg.servers.process import LAST_LINES, LogTail

HEAD = "(EngineCore pid=1360) INFO 11-21 14:08:34 [core.py:133] "


def test_the_newest_line_is_told_once_and_without_its_head(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"{HEAD}of the server before\n")
    log = LogTail(path)
    assert log.newest() == ""
    with path.open("a") as file:
        file.write(f"{HEAD}Resolved architecture: LlamaForCausalLM\n\x1b[36m(APIServer pid=1)\x1b[0m loading 0%\rloa")
        file.flush()
        assert log.newest() == "loading 0%"
        file.write("ding 50%\n\n")
        file.flush()
        assert log.newest() == "loading 50%"
    assert log.newest() == ""


def test_the_last_lines_are_those_of_the_process_that_failed_first(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("ValueError: of the server before\n")
    log = LogTail(path)
    with path.open("a") as file:
        file.writelines(f"{HEAD}line {number}\n" for number in range(50))
        file.write("(Worker pid=7) ERROR 11-21 14:17:25 [multiproc_executor.py:1063] RuntimeError: no kernel\n")
        file.writelines(f"{HEAD}Traceback of those who waited {number}\n" for number in range(50))
        file.write("RuntimeError: Engine core initialization failed. See root cause above.\n")
    lines = log.last_lines()
    assert len(lines) == LAST_LINES
    assert lines[-1].endswith("RuntimeError: no kernel")


def test_errors_are_found_among_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("")
    log = LogTail(path)
    with path.open("a") as file:
        file.write(f"{HEAD}Loading weights took 0.01 seconds\n{HEAD.replace('INFO', 'ERROR')}the pump is dry\n")
        file.write("ERROR 11-21 14:08:34 [launcher.py:1] \x1b[31mthe well too\x1b[0m\nan ERROR is no level here\n")
        file.flush()
        assert log.new_errors() == ["the pump is dry", "the well too"]
    assert log.new_errors() == []
