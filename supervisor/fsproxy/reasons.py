"""Why a conversation closed, in words; the first two are the contract's (spec S3)."""

EOF = "pipe EOF"
PROCESS_EXIT = "process exit"
SLOW = "deadline"
FAULT = "internal error"
