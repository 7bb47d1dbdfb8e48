//! The supervisor with real processes: shell scripts act as ranks.

use std::path::Path;
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use crate::*;

#[derive(Default)]
struct CapturedOutput {
    stdout: String,
    stderr: String,
}

impl Console for CapturedOutput {
    fn stdout(&mut self, bytes: &[u8]) {
        self.stdout.push_str(&String::from_utf8_lossy(bytes));
    }

    fn stderr(&mut self, bytes: &[u8]) {
        self.stderr.push_str(&String::from_utf8_lossy(bytes));
    }
}

struct FinishedRun {
    ending: Result<Ending, LaunchError>,
    console: CapturedOutput,
    took: Duration,
    dir: tempfile::TempDir,
}

impl FinishedRun {
    fn failure(&self) -> RankFailure {
        match &self.ending {
            Ok(Ending::Failed(failure)) => failure.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// The failure, with everything that differs from run to run replaced.
    fn report(&self) -> String {
        let RankFailure { text, hint, code } = self.failure();
        let mut text = text.replace(&host_name(), "[host]");
        if let Some(at) = text.find("pid ") {
            let digits = text[at + 4..].chars().take_while(char::is_ascii_digit).count();
            text.replace_range(at + 4..at + 4 + digits, "[pid]");
        }
        format!("{code}: {text} [{}]", hint.unwrap_or_default())
    }
}

fn run_with(ranks: u32, script: &str, change: impl FnOnce(&mut Supervisor)) -> FinishedRun {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("scratch")).unwrap();
    let mut job = Supervisor {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        nodes: 1,
        node: 0,
        local_world_size: ranks,
        master_addr: String::new(),
        master_port: None,
        token: None,
        version: "1".into(),
        join_timeout: Duration::from_secs(60),
        max_restarts: 0,
        grace: Duration::from_secs(1),
        scratch: dir.path().join("scratch"),
        // Without it, rank 0 would write to this test's own output.
        tee: Some(Tee { dir: dir.path().join("logs"), stdout: true, stderr: true }),
        shown: None,
        variables: Vec::new(),
        mpiexec: None,
    };
    change(&mut job);
    let mut console = CapturedOutput::default();
    let start = Instant::now();
    let ending = supervise(&job, &mut console);
    let took = start.elapsed();
    let left: Vec<_> = job.scratch.read_dir().into_iter().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    FinishedRun { ending, console, took, dir }
}

fn run(ranks: u32, script: &str) -> FinishedRun {
    run_with(ranks, script, |_| ())
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn output_of_all_ranks_but_zero_has_a_prefix() {
    let ran = run(2, "echo out $RANK; echo err $RANK >&2; printf 'no end of line'");
    assert_eq!(ran.ending.as_ref().unwrap(), &Ending::Done);
    assert_eq!(ran.console.stdout, "out 0\nno end of line");
    let mut lines: Vec<&str> = ran.console.stderr.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 1] err 1", "[rank 1] no end of line", "[rank 1] out 1", "err 0"]);
    assert_eq!(read(&ran.dir.path().join("logs/rank-1.stdout.log")), "out 1\nno end of line");
    assert_eq!(read(&ran.dir.path().join("logs/rank-0.stderr.log")), "err 0\n");
    println!("two ranks started and ended in {:?}", ran.took);
}

#[test]
fn only_selected_ranks_are_shown() {
    let ran = run_with(3, "echo out $RANK", |job| job.shown = Some(vec![2]));
    assert_eq!((ran.console.stdout.as_str(), ran.console.stderr.as_str()), ("", "[rank 2] out 2\n"));
    assert_eq!(read(&ran.dir.path().join("logs/rank-0.stdout.log")), "out 0\n");
}

#[test]
fn ranks_get_the_variables_of_their_world() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $NODE_RANK $MASTER_ADDR \
                  $LOCKSTEP_SERVER $LOCKSTEP_RESTART ${#LOCKSTEP_TOKEN} $((MASTER_PORT > 0))";
    let ran = run(2, script);
    assert_eq!(ran.console.stdout, "0/2 0/2 0 0 127.0.0.1 launcher 0 64 1\n");
    assert_eq!(ran.console.stderr, "[rank 1] 1/2 1/2 0 0 127.0.0.1 launcher 0 64 1\n");
    let ran = run_with(2, "echo $RANK/$WORLD_SIZE $GROUP_RANK $MASTER_ADDR:$MASTER_PORT", |job| {
        (job.nodes, job.node, job.master_addr, job.master_port) = (3, 2, "alpha".into(), Some(4000));
        job.token = Some(Token::random().unwrap());
    });
    let mut lines: Vec<&str> = ran.console.stderr.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 4] 4/6 2 alpha:4000", "[rank 5] 5/6 2 alpha:4000"]);
}

#[test]
fn one_failure_ends_all_within_a_second() {
    for others in ["exec sleep 60", "trap '' TERM; while :; do sleep 0.05; done"] {
        let ran = run(4, &format!("if [ $RANK = 2 ]; then sleep 0.2; exit 3; fi; {others}"));
        assert_eq!(ran.report(), "71: rank 2 (pid [pid] on [host]) exited with code 3 []");
        println!("all ended {:?} after the failure", ran.took - Duration::from_millis(200));
        assert!(ran.took < Duration::from_millis(1200), "{:?}", ran.took);
    }
}

#[test]
fn a_killed_rank_is_reported_with_its_signal() {
    let ran = run(2, "if [ $RANK = 1 ]; then kill -9 $$; fi; exec sleep 60");
    assert_snapshot!(ran.report(), @"71: rank 1 (pid [pid] on [host]) was killed by signal 9 (SIGKILL) [The kernel kills processes with SIGKILL when memory runs out: check the kernel log (dmesg).]");
}

#[test]
fn the_error_file_of_a_rank_is_reported() {
    let script = "if [ $RANK = 1 ]; then echo '{\"error\": \"row 3\", \"hint\": \"fix it\", \"cause_code\": null}' \
                  > $LOCKSTEP_ERROR_FILE; exit 65; fi; sleep 0.1; echo last words >&2; exit 71";
    let ran = run(2, script);
    assert_snapshot!(ran.report(), @"65: rank 1 (pid [pid] on [host]) failed with exit code 65: row 3 [fix it]");
    assert!(!ran.console.stderr.contains("row 3"), "only the caller prints it");
}

#[test]
fn failed_ranks_are_restarted() {
    let script = "echo attempt $LOCKSTEP_RESTART; if [ $LOCKSTEP_RESTART = 0 ] && [ $RANK = 1 ]; then exit 70; fi; \
                  if [ $LOCKSTEP_RESTART = 0 ]; then exec sleep 60; fi";
    let ran = run_with(2, script, |job| job.max_restarts = 3);
    assert_eq!(ran.ending.as_ref().unwrap(), &Ending::Done);
    assert_eq!(ran.console.stdout, "attempt 0\nattempt 1\n");
    assert!(
        ran.console.stderr.contains("restarting all ranks in 1 s (restart 1 of 3)\n"),
        "{}",
        ran.console.stderr
    );
    assert!(ran.took > Duration::from_secs(1) && ran.took < Duration::from_millis(2500), "{:?}", ran.took);
    println!("failed, waited 1 s, restarted and finished in {:?}", ran.took);
}

#[test]
fn permanent_errors_are_not_retried() {
    for code in [2, 64, 65, 66, 77] {
        let ran = run_with(1, &format!("exit {code}"), |job| job.max_restarts = 3);
        assert_eq!((i32::from(ran.failure().code), ran.console.stderr.as_str()), (code, ""));
    }
    let ran = run_with(1, "exit 70", |job| job.max_restarts = 1);
    assert_eq!(ran.failure().code, 70);
}

/// A process started by a rank may hold the rank's output streams open.
#[test]
fn a_grandchild_does_not_block_the_launcher() {
    let ran = run(1, "sleep 3 & echo done");
    assert_eq!(ran.console.stdout, "done\n");
    assert!(ran.took < Duration::from_secs(1), "{:?}", ran.took);
}

#[test]
fn a_missing_program_is_reported() {
    let ran = run_with(2, "", |job| job.program = "/nowhere/lockstep".into());
    assert_snapshot!(ran.ending.unwrap_err(), @"cannot start /nowhere/lockstep: No such file or directory (os error 2)");
}

#[test]
fn long_lines_are_truncated_and_invalid_utf8_is_relayed() {
    let ran =
        run(2, "if [ $RANK = 1 ]; then head -c 300000 /dev/zero | tr '\\0' x; printf '\\n\\377\\n'; fi");
    let lines: Vec<&str> = ran.console.stderr.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].len() <= (64 << 10) + 20, "{}", lines[0].len());
    assert_eq!(lines[1], "[rank 1] \u{fffd}");
}

#[test]
fn several_nodes_need_a_token() {
    let ran = run_with(1, "true", |job| job.nodes = 2);
    assert!(matches!(ran.ending, Err(LaunchError::NoToken { nodes: 2 })));
}

#[test]
fn folders_of_killed_launchers_are_removed() {
    let ran = run_with(1, "true", |job| {
        let dead =
            std::process::Command::new("true").spawn().and_then(|mut child| child.wait().map(|_| child.id()));
        std::fs::create_dir(job.scratch.join(format!("lockstep-launch-{}-0", dead.unwrap()))).unwrap();
    });
    assert_eq!(ran.ending.unwrap(), Ending::Done);
}

#[test]
fn debug_output_does_not_show_the_token() {
    let token = Token::random().unwrap();
    let secret = token.variable().1;
    let job = Supervisor {
        program: "x".into(),
        args: Vec::new(),
        nodes: 1,
        node: 0,
        local_world_size: 1,
        master_addr: String::new(),
        master_port: None,
        token: Some(token),
        version: String::new(),
        join_timeout: Duration::ZERO,
        max_restarts: 0,
        grace: Duration::ZERO,
        scratch: std::env::temp_dir(),
        tee: None,
        shown: None,
        variables: Vec::new(),
        mpiexec: None,
    };
    assert!(!format!("{job:?}").contains(&secret));
}

/// Runs the script through a stand-in for mpiexec, which starts one process for all ranks.
fn run_through_mpiexec(script: &str, change: impl FnOnce(&mut Supervisor)) -> FinishedRun {
    run_with(3, script, |job| {
        let program = job.scratch.with_file_name("mpiexec");
        // Another process writes it: one that this process has open for writing while it forks cannot be started.
        let stand_in = "#!/bin/sh\nprintf '%s\\n' \"$1 $2 $3\"\nshift 3\nexec \"$@\"";
        let write = "printf '%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
        let mut shell = std::process::Command::new("/bin/sh");
        assert!(shell.args(["-c", write]).arg(&program).arg(stand_in).status().unwrap().success());
        job.mpiexec = Some(MpiExec { program, args: vec!["--quietly".into()] });
        change(job);
    })
}

#[test]
fn mpiexec_starts_all_ranks_without_naming_them() {
    let script = "echo \"$MASTER_ADDR $LOCKSTEP_SERVER $RANK,$WORLD_SIZE,$LOCKSTEP_LAUNCHER_PID\"";
    let ran = run_through_mpiexec(script, |_| {});
    assert_eq!(ran.ending.as_ref().unwrap(), &Ending::Done);
    assert_eq!(ran.console.stdout, "-n 3 --quietly\n127.0.0.1 launcher ,,\n");
}

#[test]
fn the_first_error_of_a_rank_under_mpiexec_is_reported_and_the_ranks_are_restarted() {
    let note = r#"echo '{"error": "row 3 is bad", "hint": "mend it"}' > $LOCKSTEP_ERROR_FILE"#;
    let ran = run_through_mpiexec(&format!("{note}; exit 65"), |job| job.max_restarts = 1);
    assert_snapshot!(ran.report(), @"65: row 3 is bad [mend it]");
    let script = "test $LOCKSTEP_RESTART = 1 || exit 9; echo again";
    let ran = run_through_mpiexec(script, |job| job.max_restarts = 1);
    assert_eq!(ran.ending.as_ref().unwrap(), &Ending::Done);
    let text = "mpiexec ended with exit code 9 before all ranks had joined";
    assert!(ran.console.stderr.contains(text), "{}", ran.console.stderr);
    assert!(ran.console.stdout.ends_with("again\n"), "{}", ran.console.stdout);
    let killed = run_through_mpiexec("kill -9 $$", |_| {});
    assert_snapshot!(killed.report(), @"71: mpiexec was killed by signal 9 (SIGKILL) [Its own messages above say more.]");
}
