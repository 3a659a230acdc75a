"""`rayllm collect-env` shows what a bug report needs, and no secrets."""

from typer.testing import CliRunner

from rayllm.cli import main as cli


def test_no_secrets():
    secrets = {"RAYLLM_API_KEY": "hunter2", "RAY_ADDRESS": "ray://user:hunter3@head:1", "CUDA_VISIBLE_DEVICES": "0,1"}
    result = CliRunner().invoke(cli.app, ["collect-env"], env=secrets)
    assert result.exit_code == 0, result.output
    assert "hunter" not in result.stdout
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert rows["RAYLLM_API_KEY"] == "is set"
    assert rows["torch"][0].isdigit()
    assert rows["memory"].endswith("GiB")
