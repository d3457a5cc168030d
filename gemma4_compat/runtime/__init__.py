"""What runs during a forward, on behalf of a patch.

A module of this package replaces no attribute of a library, and imports no patch.  ``capture``
uses ``host``, ``host`` uses ``experts``, and ``experts`` and ``loss`` use ``kernels``; never the
other way.
"""
