//! Reward programs and endpoints that fail in every way. One test executable.

#![forbid(unsafe_code)]
// Tests that are skipped print why.
#![allow(clippy::print_stdout)]

mod documents;
mod http;
mod program;
mod program_end;
mod program_environment;
mod support;
