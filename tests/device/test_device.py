"Each long check passes; see conftest.py."
import pytest
from device_checks import CHECKS


@pytest.mark.parametrize('name', CHECKS)
def test_check(name, bench):
    findings = list(CHECKS[name](bench))
    for f in findings: print(f'{f.what}: {f.figure:.3g} {f.unit} {f.expected}')
    assert findings and [f.what for f in findings if not f.passed] == []
