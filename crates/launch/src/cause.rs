//! Finds the rank that caused a failure, and formats the report.

use std::fmt;
use std::io::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::abort::{Abort, Member};
use crate::stop_policy::Exit;

/// What a failing rank writes to its error file, for the launcher to report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorNote {
    pub error: String,
    pub hint: Option<String>,
    /// If this rank ends because another one failed: the exit code of that failure.
    pub cause_code: Option<u8>,
}

const MAX_NOTE_BYTES: u64 = 1 << 20;

impl ErrorNote {
    /// Writes the file, unless it exists: the first error is the cause, later ones are consequences.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).open(path)?;
        file.write_all(&serde_json::to_vec(self).map_err(std::io::Error::other)?)
    }

    pub(crate) fn read(path: &Path) -> Option<ErrorNote> {
        use std::io::Read as _;
        let mut text = Vec::new();
        std::fs::File::open(path).ok()?.take(MAX_NOTE_BYTES).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

/// A rank of this node that has ended.
#[derive(Clone, Debug)]
pub(crate) struct EndedRank {
    pub(crate) member: Member,
    pub(crate) exit: Exit,
    /// The launcher asked it to end, or killed it.
    pub(crate) stopped: bool,
    pub(crate) note: Option<ErrorNote>,
}

/// Why the ranks failed, reported once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFailure {
    pub text: String,
    pub hint: Option<String>,
    /// The exit code of the launcher.
    pub code: u8,
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Exit codes with a specific meaning, which the launcher passes on. All others become [`RANK_FAILED`].
const SPECIFIC_CODES: [i32; 11] = [2, 64, 65, 66, 69, 70, 72, 73, 75, 76, 77];
const RANK_FAILED: u8 = 71;
/// The exit code of a rank, and of a run, that stopped because of SIGTERM or SIGUSR1.
pub const STOPPED: u8 = 143;

/// Finds the cause. `ended` lists ranks in the order in which they ended; `abort` is what the rendezvous reported.
pub(crate) fn cause(ended: &[EndedRank], abort: Option<&Abort>) -> RankFailure {
    let failed = || ended.iter().filter(|e| !e.exit.is_success());
    if let Some(failure) = own_failure(ended) {
        return failure;
    }
    if let Some(stopped) = failed().find(|e| e.exit.is_stop()) {
        return RankFailure { code: STOPPED, ..of_rank(stopped) };
    }
    if let Some(abort) = abort {
        return RankFailure {
            text: abort.text.clone(),
            hint: abort.kind.hint().map(Into::into),
            code: abort.exit_code(),
        };
    }
    // The cause is on another node. The ranks on this node have received it and written it to their error files.
    if let Some((note, exit)) = failed().find_map(|e| Some((e.note.as_ref()?, e.exit))) {
        let code = note.cause_code.unwrap_or(exit_code(exit));
        return RankFailure { text: note.error.clone(), hint: note.hint.clone(), code };
    }
    match failed().next() {
        Some(first) => of_rank(first),
        None => RankFailure { text: "some ranks could not be killed".into(), hint: None, code: RANK_FAILED },
    }
}

/// Like [`cause`], of ranks that mpiexec has started: `ended` is mpiexec, whose exit code may be that of any rank, with
/// the first error of the ranks on its host.
pub(crate) fn cause_of_mpiexec(ended: &[EndedRank], abort: Option<&Abort>) -> RankFailure {
    let note = ended.iter().find_map(|e| e.note.as_ref());
    if let Some(abort) = abort {
        let hint = note.filter(|note| abort.text.contains(&note.error)).and_then(|note| note.hint.clone());
        let hint = hint.or_else(|| abort.kind.hint().map(Into::into));
        return RankFailure { text: abort.text.clone(), hint, code: abort.exit_code() };
    }
    let code = ended.first().map_or(RANK_FAILED, |e| exit_code(e.exit));
    if let Some(note) = note {
        let code = note.cause_code.unwrap_or(code);
        return RankFailure { text: note.error.clone(), hint: note.hint.clone(), code };
    }
    let text = match ended.first().map(|e| e.exit) {
        Some(Exit::Code(code)) => format!("mpiexec ended with exit code {code} before all ranks had joined"),
        Some(Exit::Signal(signal)) => format!("mpiexec was killed by {}", signal_name(signal)),
        None => "mpiexec could not be killed".into(),
    };
    RankFailure { text, hint: Some("Its own messages above say more.".into()), code }
}

/// The first failure that is neither the consequence of another rank's failure nor of the launcher's signal.
pub(crate) fn own_failure(ended: &[EndedRank]) -> Option<RankFailure> {
    let is_consequence = |e: &EndedRank| e.note.as_ref().is_some_and(|note| note.cause_code.is_some());
    let ended_by_us = |e: &EndedRank| e.stopped && matches!(e.exit, Exit::Signal(_));
    let expected = |e: &EndedRank| e.exit.is_success() || e.exit.is_consequence() || e.exit.is_stop();
    ended.iter().find(|e| !expected(e) && !is_consequence(e) && !ended_by_us(e)).map(of_rank)
}

/// The first rank that did not stop by itself when asked to, and so has not saved a checkpoint.
pub(crate) fn not_saved(ended: &[EndedRank]) -> Option<RankFailure> {
    ended.iter().find(|e| !e.exit.is_success() && !e.exit.is_stop()).map(of_rank)
}

fn of_rank(ended: &EndedRank) -> RankFailure {
    let EndedRank { member, exit, note, .. } = ended;
    let code = exit_code(*exit);
    let hint = note.as_ref().and_then(|note| note.hint.clone());
    let text = match (exit, note) {
        (Exit::Code(code), Some(note)) => format!("{member} failed with exit code {code}: {}", note.error),
        (Exit::Code(code), None) => format!("{member} exited with code {code}"),
        (Exit::Signal(signal), _) => format!("{member} was killed by {}", signal_name(*signal)),
    };
    let hint = hint.or_else(|| match exit {
        Exit::Signal(9) => Some(
            "The kernel kills processes with SIGKILL when memory runs out: check the kernel log (dmesg)."
                .into(),
        ),
        _ => None,
    });
    RankFailure { text, hint, code }
}

fn exit_code(exit: Exit) -> u8 {
    match exit {
        Exit::Code(code) if SPECIFIC_CODES.contains(&code) => code as u8,
        _ => RANK_FAILED,
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::abort::AbortKind;

    fn ended(rank: u32, exit: Exit, stopped: bool, error: Option<&str>) -> EndedRank {
        let member = Member { rank, node: 0, local_rank: rank, host: "alpha".into(), pid: 100 + rank };
        let cause_code = exit.is_consequence().then_some(65);
        let note = error.map(|e| ErrorNote { error: e.into(), hint: Some("do it".into()), cause_code });
        EndedRank { member, exit, stopped, note }
    }

    fn report_of(list: &[EndedRank], abort: Option<&Abort>) -> String {
        let RankFailure { text, hint, code } = cause(list, abort);
        format!("{code}: {text} [{}]", hint.unwrap_or_default())
    }

    #[test]
    fn the_cause_is_reported_before_its_consequences() {
        let code = |rank, code, error| ended(rank, Exit::Code(code), false, error);
        let abort = Abort::new(AbortKind::Lost, None, "lost rank 5".into());
        assert_snapshot!(report_of(&[code(0, 71, Some("a peer")), code(1, 65, Some("row 3"))], Some(&abort)),
            @"65: rank 1 (pid 101 on alpha) failed with exit code 65: row 3 [do it]");
        assert_snapshot!(report_of(&[code(0, 71, Some("a peer")), ended(1, Exit::Signal(9), false, None)], Some(&abort)),
            @"71: rank 1 (pid 101 on alpha) was killed by signal 9 (SIGKILL) [The kernel kills processes with SIGKILL when memory runs out: check the kernel log (dmesg).]");
        assert_snapshot!(report_of(&[code(0, 3, None), ended(1, Exit::Signal(15), true, None)], None),
            @"71: rank 0 (pid 100 on alpha) exited with code 3 []");
        assert_snapshot!(report_of(&[code(0, 71, Some("a peer")), ended(1, Exit::Signal(15), true, None)], Some(&abort)),
            @"71: lost rank 5 [The kernel may have killed the process because the host ran out of memory: check the kernel log on that host (dmesg).]");
        assert_snapshot!(report_of(&[code(0, 71, Some("rank 7 (pid 1 on beta) failed with exit code 65: row 3"))], None),
            @"65: rank 7 (pid 1 on beta) failed with exit code 65: row 3 [do it]");
        assert_snapshot!(report_of(&[ended(1, Exit::Signal(15), true, None)], None),
            @"71: rank 1 (pid 101 on alpha) was killed by signal 15 (SIGTERM) []");
    }

    #[test]
    fn the_first_error_note_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error");
        let note = |error: &str| ErrorNote { error: error.into(), hint: None, cause_code: None };
        note("first").write(&path).unwrap();
        assert!(note("second").write(&path).is_err());
        assert_eq!(ErrorNote::read(&path), Some(note("first")));
        std::fs::write(&path, "{\"error\": ").unwrap();
        assert_eq!(ErrorNote::read(&path), None);
    }
}
