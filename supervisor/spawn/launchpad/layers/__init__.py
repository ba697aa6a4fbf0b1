"""The layers that a forked child puts on before its exec, one module each."""
