//! Intel's VT-d: Virtualization Technology for Directed I/O.
