"""The handlers of requests on FD 3, one module for each group of requests."""
