//! A web page of runs: charts of their metrics, timelines, memory, ranks, completions and configurations, of finished
//! runs and of runs in progress. It reads what runs write ([`lockstep_observe`]) and changes nothing.
//!
//! - [`Dashboard`] listens and answers, each connection on a thread of its own. Threads, sizes and times are bounded.
//! - `access` decides who may read: on an address that other machines reach, only who has the token.
//! - `runs` keeps what is known of each run. Files are read when somebody looks, and only what is new.
//! - `assets/` is the page: HTML, CSS and JavaScript without dependencies, in this binary.
//!
//! The HTTP server is our own, because the page needs little of HTTP (GET without a body), and small servers for threads
//! are no longer maintained. Requests are parsed by `httparse`, which the HTTP client already brings.
//!
//! Nothing is printed here, and no environment is read.

#![forbid(unsafe_code)]

mod access;
mod columns;
mod completions;
mod config_table;
mod connection;
mod error;
mod files;
mod health;
mod page;
mod reduce;
mod request;
mod response;
mod routes;
mod run_view;
mod runs;
mod server;
mod summary;
mod text;
mod timeline;
mod token;

pub use error::DashboardError;
pub use server::{DEFAULT_PORT, Dashboard, Options};
pub use token::Token;
