//! The web page of runs: `lockstep serve`, and beside a run in progress.

use std::path::{Path, PathBuf};

use lockstep_config::RunConfig;
use lockstep_core::Fault;
use lockstep_dashboard::{Dashboard, DashboardError, Options, Token};
use lockstep_launch::names;

use crate::args::Serve;
use crate::ranks::variable;
use crate::report::{self, Failure};

/// The token that readers must have.
const TOKEN: &str = "LOCKSTEP_DASHBOARD_TOKEN";
/// A file with the token.
const TOKEN_FILE: &str = "LOCKSTEP_DASHBOARD_TOKEN_FILE";
/// Further names of this machine, separated by commas.
const HOSTS: &str = "LOCKSTEP_DASHBOARD_HOSTS";

/// `lockstep serve`: serves runs until the process is ended.
pub(crate) fn serve(args: &Serve) -> Result<(), Failure> {
    for folder in args.runs.iter().filter(|folder| !folder.is_dir()) {
        report::print_aside(&format!("{} does not exist yet; it is served once it does", folder.display()));
    }
    let token = token(args.token_file.as_deref()).map_err(boxed)?;
    let dashboard = Dashboard::start(Options {
        address: args.address,
        port: args.port,
        token,
        max_values: Options::MANY_VALUES,
        ..options(args.runs.clone())
    });
    let dashboard = dashboard.map_err(boxed)?;
    report::print_line(&format!("dashboard at {}", dashboard.url()));
    dashboard.wait();
    Ok(())
}

/// Serves a run while it trains, if its configuration asks for that. A run goes on without its page if that cannot be
/// served. Ranks that our launcher has started leave it to the launcher.
pub(crate) fn of_run(config: &RunConfig) -> Result<Option<Dashboard>, Failure> {
    let Some(address) = config.output.dashboard.filter(|_| variable(names::LAUNCHER_PID).is_none()) else {
        return Ok(None);
    };
    let started = Dashboard::start(Options {
        address: address.ip,
        port: address.port,
        token: token(None).map_err(boxed)?,
        ..options(vec![config.output.output_dir.clone()])
    });
    match started {
        Ok(dashboard) => {
            report::print_line(&format!("dashboard at {}", dashboard.url()));
            Ok(Some(dashboard))
        }
        Err(error) => {
            let hint = error.hint().map_or_else(String::new, |hint| format!(". {hint}"));
            report::print_aside(&format!("the run goes on without its dashboard: {error}{hint}"));
            Ok(None)
        }
    }
}

/// What is the same for all: the names of this machine, and little memory.
fn options(folders: Vec<PathBuf>) -> Options {
    let hosts = variable(HOSTS).unwrap_or_default();
    Options {
        address: std::net::Ipv4Addr::LOCALHOST.into(),
        port: None,
        token: None,
        host_name: lockstep_launch::host_name(),
        hosts: hosts.split(',').map(str::to_owned).collect(),
        folders,
        max_values: Options::FEW_VALUES,
    }
}

/// The token that is given, if any. A file on the command line precedes variables.
fn token(file: Option<&Path>) -> Result<Option<Token>, DashboardError> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    match (file, given(TOKEN), given(TOKEN_FILE)) {
        (Some(path), _, _) => Token::from_file(path).map(Some),
        (None, Some(text), _) => Token::new(&text, TOKEN).map(Some),
        (None, None, Some(path)) => Token::from_file(Path::new(&path)).map(Some),
        (None, None, None) => Ok(None),
    }
}

fn boxed(error: DashboardError) -> Failure {
    Box::new(error)
}
