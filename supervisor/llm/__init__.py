"""The gateway to the model; key and quota stay with the host (spec section 5).

Nothing is imported here: a host without ``[llm]`` pays nothing.  ``service`` is what
sessions know (``fsproxy.ports.Model``), ``gateway`` makes the calls, ``quota`` counts,
``provider`` is the only module that holds a key (I10).  Read on in ``docs/reference/llm.md``.

Public: ``conversations``, ``errors``, ``gateway``, ``models``, ``opening``,
``prompt_size``, ``quota``, ``recipe``, ``section``, ``service``.
"""
