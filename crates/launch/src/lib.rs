//! Starts ranks, brings them together and watches over them.

#![forbid(unsafe_code)]
