"""Every bound of the FS Proxy wire, each with its reason.

A host may lower some of them through its configuration; no setting raises a bound that
protects memory.  Sizes are bytes.
"""

MAX_LINE_BYTES = 65_536
"""Longest request line before its LF (spec F4).

A path is at most 4,096 bytes on Linux, so sixteen times that leaves room for every
command and still bounds what one client can make the host hold before it is refused.
"""

MAX_REPLY_LINE_BYTES = 65_536
"""Longest reply line a client accepts; no reply of this host passes 1 KiB."""

MAX_DIGITS = 18
"""Longest number (spec F5): 10**18 - 1 fits a signed 64-bit integer, 19 digits may not."""

MAX_ECHO_BYTES = 200
"""Longest piece of peer text that an error repeats (spec F6)."""

MAX_READ_BYTES = 16 * 1024 * 1024
"""Most bytes that one READ answers (spec R1), even if it asks for more."""

MAX_WRITE_BYTES = 16 * 1024 * 1024
"""Largest WRITE payload by default (spec W3); a longer one is drained and refused."""

MAX_NAMES_BYTES = 65_536
"""Most that RENAME may declare for its two names; PATH_MAX is 4,096 on Linux."""

MAX_LIST_ENTRIES = 100_000
"""Most entries that one LIST answers (spec X1), some 6 MiB of JSON; a directory with more
is ``failed to list 'F': Value too large for defined data type``."""

MAX_NARROW_BYTES = 65_536
"""Largest NARROW document: some thousand paths, far above what a command line holds."""

MAX_CHAT_BYTES = 8_388_608
"""Largest sum of the four LLM_CHAT parts (spec L2)."""

FIRST_FILENO = 1000
"""Where filenos start (spec O9): far above the numbers of real descriptors."""

MEMO_LINES = 128
"""Most parsed lines that a connection keeps (see ``connection``)."""

MEMO_LINE_BYTES = 128
"""Longest line that a connection keeps: ``WRITE`` with two 18-digit numbers is 43 bytes,
an ``OPEN`` that recurs names a file of this length at most.  With ``MEMO_LINES`` it
bounds the kept lines of a connection to some 40 KiB."""
