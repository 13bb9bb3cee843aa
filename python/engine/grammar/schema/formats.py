"""The `format` values that are enforced, each as a regular expression for the whole text.

Where a standard allows rarely used forms, the expression is a subset: what it matches is valid.
"""

_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY_OF_YEAR = rf"(?:[0-9]{{4}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_YEAR_ONE = r"^(?!0000)"
_CLOCK = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_NUMBER = r"[0-9]{1,9}"
_CLOCK_PARTS = rf"(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_DAY_PARTS = rf"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_DURATION = rf"P(?:{_NUMBER}W|{_DAY_PARTS}(?:T{_CLOCK_PARTS})?|T{_CLOCK_PARTS})"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]"
_GROUP = rf"{_HEX}{{1,4}}"
# Short enough for the limits of 63 and 253; counting to those would need a state per character.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,18}[A-Za-z0-9])?"
_WORD = r"[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_URI_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI_TAIL = rf"(?:\?(?:{_URI_CHARACTER}|[/?])*)?(?:#(?:{_URI_CHARACTER}|[/?])*)?"
_HOST_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_AUTHORITY = rf"//{_HOST_CHARACTER}+(?::[0-9]{{1,5}})?(?:/{_URI_CHARACTER}*)*"
_PATH = rf"{_URI_CHARACTER}+(?:/{_URI_CHARACTER}*)*"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_IPV6 = "|".join(
    [f"(?:{_GROUP}:){{7}}{_GROUP}"]
    + [
        f"(?:{_GROUP}(?::{_GROUP}){{0,{left - 1}}})?::(?:{_GROUP}(?::{_GROUP}){{0,{6 - left}}})?"
        if left
        else f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?"
        for left in range(7)
    ]
)

FORMATS = {
    "date": rf"{_YEAR_ONE}{_DAY_OF_YEAR}$",
    "time": rf"^{_CLOCK}$",
    "date-time": rf"{_YEAR_ONE}{_DAY_OF_YEAR}T{_CLOCK}$",
    "duration": rf"^{_DURATION}$",
    "uuid": rf"^{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$",
    "uuid4": rf"^{_HEX}{{8}}-{_HEX}{{4}}-4{_HEX}{{3}}-[89ABab]{_HEX}{{3}}-{_HEX}{{12}}$",
    "ipv4": rf"^{_OCTET}(?:\.{_OCTET}){{3}}$",
    "ipv6": rf"^(?:{_IPV6})$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_WORD}(?:\.{_WORD})+$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "uri": rf"^{_SCHEME}:(?:{_AUTHORITY}|/?{_PATH}){_URI_TAIL}$",
    "json-pointer": rf"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": r"^[A-Za-z0-9_-]*={0,2}$",
}
"""Enforced on strings."""

INTEGER_FORMATS = {"int32": 31, "int64": 63}
"""Enforced on numbers: the bits of the magnitude."""

ANNOTATION_FORMATS = frozenset(
    {"password", "binary", "path", "file-path", "directory-path", "float", "double", "textarea"}
)
"""Every value of the type is valid: they say how to show or store it."""
