"""The program of a response, among blocks of other languages, nested fences and thoughts."""

import pytest

from forge_sandbox.code_verifier import CodeBlock, code_block, code_blocks

DOC = "def f():\n    '''\n    ```\n    f()\n    ```\n    '''\n"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```sh\npip install x\n```\nthen\n```python\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(2)\n```\nIt prints:\n```\n2\n```", "print(2)\n"),
        ("```python\nprint(2)\n```\n```text\n2\n```\n```json\n{}\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nBetter:\n```py\nprint(2)\n```", "print(2)\n"),
        ("```\nprint(2)\n```", "print(2)\n"),
        ("~~~ Python3\nprint(2)\n~~~", "print(2)\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        (f"```python\n{DOC}```", DOC),
        ("1. Write\n   ```python\n   print(2)\n   ```", "print(2)\n"),
        ("<answer>\n```python\nprint(2)\n```\n</answer>", "print(2)\n"),
        ('```python title="a.py"\nprint(2)\n```', "print(2)\n"),
        ("```{python}\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(2)", "print(2)"),  # CommonMark closes it with the text
        ("<think>\n```python\nprint(1)\n```\n</think>\n```python\nprint(2)\n```", "print(2)\n"),
        ("<think>\n```python\nprint(1)\n```\n</think>\nnone", None),
        ("```js\nconsole.log(2)\n```", None),
        ("```bash\nls\n```", None),
        ("`print(2)`", None),
        ("print(2)", None),
        ("```python\nprint(1)```\nprint(2)\n```", "print(1)```\nprint(2)\n"),  # a fence closes on a separate line
    ],
)
def test_extracted_code_is_last_python_block_of_response(response, program):
    assert code_block(response) == program


def test_extracted_code_blocks_keep_order_and_language():
    text = "```Bash\nls\n```\n\n    ```\n    indented code, no fence\n\n~~~\nx\n~~~"
    assert code_blocks(text) == [CodeBlock("bash", "ls\n"), CodeBlock("", "x\n")]
