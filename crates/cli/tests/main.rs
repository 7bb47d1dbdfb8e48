//! Tests of the real binary in temporary folders: its output, exit codes and files.

#![forbid(unsafe_code)]

mod algorithms;
mod bad_config;
mod bad_data;
mod bad_model;
mod bench;
mod commands;
mod completions;
mod dependencies;
mod device;
mod dialects;
mod docs;
mod doctor;
mod environment;
mod evaluation;
mod export;
mod first_save;
mod generate;
mod half_precision;
mod help;
mod hub;
mod kill_and_resume;
mod launch;
mod launch_ends;
mod launch_refused;
mod learning;
mod memory;
mod messages;
mod output_folder;
mod panics;
mod plan_costs;
mod prepare;
mod resume;
mod secrets;
mod selftest;
mod start_up;
mod starters;
mod stop;
mod support;
mod tensors;
mod tidy;
mod token_ids;
mod words;
mod workflows;
mod worlds;
