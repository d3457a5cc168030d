"""What runs during a forward, on behalf of a patch.

A module of this package replaces no attribute of a library, and knows no patch.  ``capture`` uses
``host``, ``host`` uses ``experts``, and ``experts`` uses ``kernels``; never the other way.
"""
