import subprocess
import sys


def test_a_gateway_never_loads_torch() -> None:
    """Import contracts see direct imports only; a gateway pod must stay small whatever others import."""
    check = "import gateway.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
