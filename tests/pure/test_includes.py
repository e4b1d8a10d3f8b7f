"""Sources of the native extension include the standard header of each name before they use it.

Which header brings which other differs between standard libraries: what GCC's takes, the one that wheels are built with
may refuse.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = {
    "algorithm": r"std::(min|max|clamp|sort|stable_sort|fill|fill_n|copy|copy_n|find|find_if|any_of|all_of|none_of|"
    r"partial_sort|nth_element|lower_bound|upper_bound|max_element|min_element)\b",
    "array": r"std::array\b",
    "atomic": r"std::(atomic|memory_order)\w*",
    "bit": r"std::(bit_cast|countr_zero|countl_zero|popcount|bit_width|bit_ceil|has_single_bit)\b",
    "chrono": r"std::chrono\b",
    "cmath": r"std::(exp|expm1|log|pow|sqrt|tanh|floor|ceil|round|lround|nearbyint|isfinite|isnan|abs|ldexp|fma|erf)\b",
    "condition_variable": r"std::condition_variable\b",
    "cstddef": r"std::(size_t|ptrdiff_t|byte|max_align_t)\b",
    "cstdint": r"std::(u?int(8|16|32|64|ptr)_t)\b",
    "cstring": r"std::(memcpy|memset|memmove|memcmp|strlen|strcmp|strerror)\b",
    "functional": r"std::function\b",
    "limits": r"std::numeric_limits\b",
    "memory": r"std::(unique_ptr|shared_ptr|make_unique|make_shared|weak_ptr)\b",
    "mutex": r"std::(mutex|lock_guard|unique_lock|scoped_lock|once_flag|call_once)\b",
    "optional": r"std::(optional|nullopt)\b",
    "stdexcept": r"std::(runtime_error|invalid_argument|out_of_range|logic_error|overflow_error)\b",
    "string": r"std::(string|to_string)\b",
    "string_view": r"std::string_view\b",
    "system_error": r"std::(system_error|error_code|generic_category|system_category)\b",
    "thread": r"std::(thread|this_thread)\b",
    "type_traits": r"std::(is_same_v|conditional_t|enable_if_t|decay_t|remove_cvref_t|is_invocable_v|type_identity)\b",
    "utility": r"std::(move|swap|pair|exchange|forward|index_sequence|integer_sequence|make_index_sequence)\b",
    "vector": r"std::vector\b",
}  # fmt: skip
SOURCES = sorted(CSRC.glob("*.cpp"))
INCLUDE = re.compile(r'\s*#\s*include\s+(?:<([\w/.]+)>|"([\w.-]+)")')


def unknown_names(source: Path) -> list[str]:
    """What `source`, with all of ours that it includes in their order, uses before the standard header of it comes."""
    seen: set[Path] = set()
    standard: set[str] = set()
    found: list[str] = []

    def read(path: Path) -> None:
        if path in seen or not path.exists():
            return
        seen.add(path)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if include := INCLUDE.match(line):
                if include[1]:
                    standard.add(include[1])
                else:
                    read(CSRC / include[2])
                continue
            code = re.sub(r"//.*|\"(\\.|[^\"\\])*\"", "", line)
            found.extend(
                f"{path.name}:{number}: {name[0]} before <{header}>"
                for header, names in HEADERS.items()
                if header not in standard and (name := re.search(names, code))
            )

    read(source)
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_standard_headers_come_before_their_names(source: Path) -> None:
    assert unknown_names(source) == []
