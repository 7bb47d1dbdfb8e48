//! Requests by hand, over loopback.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use lockstep_dashboard::{Dashboard, Options, Token};
use lockstep_observe::{EvalRecord, RunInfo, RunLog, SettingRow, StepCost, StepRecord};
use serde_json::Value;

/// Generous, for a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);
const TOKEN: &str = "0123456789abcdef-token";
const HOSTILE: &str = "</script><img src=x onerror=alert(1)>\u{1b}[2J\u{202e}\"'";

fn options(folder: &Path) -> Options {
    Options {
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port: Some(0),
        token: None,
        host_name: "box".into(),
        hosts: vec![],
        folders: vec![folder.to_path_buf()],
        max_values: Options::FEW_VALUES,
    }
}

/// What a server has answered.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        assert!(self.head.contains("Content-Type: application/json\r\n"), "{}", self.head);
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, DEADLINE).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Sends bytes as they are, and reads until the server closes.
fn send(address: SocketAddr, request: &str) -> Answer {
    let mut stream = connect(address);
    stream.write_all(request.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
    Answer { status, head: format!("{head}\r\n"), body: body.to_owned() }
}

fn get_with(address: SocketAddr, path: &str, headers: &str) -> Answer {
    send(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n"))
}

fn get(address: SocketAddr, path: &str) -> Answer {
    get_with(address, path, "")
}

fn record(step: u64) -> StepRecord {
    StepRecord {
        step,
        epoch: 0.5,
        loss: 4.0 / step as f64,
        grad_norm: 1.0,
        learning_rate: 1e-3,
        tokens: 100,
        tokens_total: 100 * step,
        tokens_per_second: 200.0,
        step_seconds: 0.5,
        skipped: false,
        loss_scale: None,
        others: vec![("rewards/mean".into(), 0.25)],
        cost: StepCost { numbers: vec![("mfu", 0.5)], rank_busy_seconds: vec![0.25, 0.5] },
    }
}

/// A run of some steps, as a run in progress writes it.
fn write_run(dir: &Path, name: &str, steps: u64) -> RunLog {
    let mut log = RunLog::open(dir, None).unwrap();
    let settings = vec![
        SettingRow { key: "learning_rate".into(), value: "1e-3".into(), origin: "run.yaml:1:1".into() },
        SettingRow { key: "train_files".into(), value: HOSTILE.into(), origin: "default".into() },
    ];
    let info = RunInfo {
        name: name.into(),
        config: format!("train_files: {HOSTILE}\n"),
        all_settings: settings,
        ranks: 2,
        total_steps: 1000,
        command: "lockstep train run.yaml".into(),
        ..RunInfo::default()
    };
    info.write(dir).unwrap();
    (1..=steps).for_each(|step| log.step(&record(step)).unwrap());
    let evaluation = EvalRecord { step: steps, loss: Some(2.5), seconds: 1.0, ..EvalRecord::default() };
    log.evaluation(&evaluation).unwrap();
    log.event(HOSTILE).unwrap();
    log
}

#[test]
fn the_page_and_its_data() {
    let dir = tempfile::tempdir().unwrap();
    let _log = write_run(dir.path(), "first", 5);
    let dashboard = Dashboard::start(options(dir.path())).unwrap();
    let at = dashboard.address();
    assert_eq!(dashboard.url(), format!("http://127.0.0.1:{}/", at.port()));
    let page = get(at, "/");
    assert_eq!(page.status, 200);
    for header in ["default-src 'none'", "nosniff", "no-referrer", "frame-ancestors 'none'", "no-store"] {
        assert!(page.head.contains(header), "{}", page.head);
    }
    // Every file that the page names is there, and none is anywhere else.
    let mut open: Vec<String> = vec![page.body];
    let mut seen = Vec::new();
    while let Some(text) = open.pop() {
        assert!(!text.contains("https://") && !text.contains("innerHTML"), "{text}");
        let imports = text
            .split("from \"./")
            .skip(1)
            .map(|rest| format!("/assets/{}", rest.split('"').next().unwrap()));
        let links = text
            .split("\"/assets/")
            .skip(1)
            .map(|rest| format!("/assets/{}", rest.split('"').next().unwrap()));
        for path in imports.chain(links).collect::<Vec<_>>() {
            if !seen.contains(&path) {
                let file = get(at, &path);
                assert_eq!(file.status, 200, "{path}");
                open.push(file.body);
                seen.push(path);
            }
        }
    }
    assert!(seen.len() >= 13, "{seen:?}");

    let list = get(at, "/api/runs").json();
    let run = &list["runs"][0];
    assert_eq!((&run["name"], &run["state"], &run["step"]), (&"first".into(), &"running".into(), &5.into()));
    assert_eq!((&run["eval_loss"], &run["tokens_per_second"]), (&2.5.into(), &200.0.into()));
    let keys = get(at, "/api/runs/0/keys").json();
    assert!(
        keys["keys"].as_array().unwrap().contains(&"rewards/mean".into()) && keys["ranks"] == 2,
        "{keys}"
    );
    let series = get(at, "/api/runs/0/series?keys=loss,rewards%2Fmean,rank_busy_seconds/1&x=tokens").json();
    assert_eq!(series["series"][0]["y"], serde_json::json!([4, 2, 4.0 / 3.0, 1, 0.8]));
    assert_eq!(series["series"][1]["x"], serde_json::json!([100, 200, 300, 400, 500]));
    assert_eq!(series["series"][2]["y"][0], 0.5);
    let details = get(at, "/api/runs/0").json();
    assert_eq!(details["command"], "lockstep train run.yaml");
    let config = get(at, "/api/config?runs=0,0").json();
    assert_eq!(
        (&config[0]["runs"][0]["origin"], &config[0]["differs"]),
        (&"run.yaml:1:1".into(), &false.into())
    );
    let metrics = get(at, "/metrics");
    assert!(metrics.body.contains("lockstep_loss{run=\"first\"} 0.8\n"), "{}", metrics.body);
    assert!(metrics.body.contains("lockstep_seconds_since_last_write{run=\"first\"} "), "{}", metrics.body);
    let head = send(at, &format!("HEAD / HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n"));
    assert!(head.status == 200 && head.body.is_empty() && !head.head.contains("Content-Length: 0\r\n"));
    // Two requests over one connection.
    let two = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert!(send(at, two).body.contains("HTTP/1.1 200 OK"));
}

#[test]
fn hostile_texts_are_text() {
    let dir = tempfile::tempdir().unwrap();
    let _log = write_run(&dir.path().join("<b>x"), HOSTILE, 2);
    let line = serde_json::json!({ "step": 1, "prompt": HOSTILE, "completion": HOSTILE, "rewards": { HOSTILE: 1.0 } });
    std::fs::write(dir.path().join("<b>x/completions.jsonl"), format!("{line}\n")).unwrap();
    let dashboard = Dashboard::start(options(dir.path())).unwrap();
    let at = dashboard.address();
    for path in
        ["/api/runs", "/api/runs/0", "/api/runs/0/log", "/api/runs/0/completions", "/api/config?runs=0"]
    {
        let answer = get(at, path);
        assert_eq!(answer.status, 200, "{path}");
        let json = answer.json().to_string();
        // Nothing that would be invisible is left, and JSON is never taken for a page.
        assert!(json.contains("alert(1)") && json.contains("\\\\u{1b}[2J"), "{path}: {json}");
        assert!(!json.contains("\\u001b") && !json.contains('\u{202e}'), "{path}: {json}");
        assert!(answer.head.contains("nosniff"));
    }
    let metrics = get(at, "/metrics").body;
    assert!(
        metrics.lines().all(|line| line.starts_with("lockstep_") || line.starts_with("# TYPE ")),
        "{metrics}"
    );
}

#[test]
fn a_token_protects_everything_but_health() {
    let dir = tempfile::tempdir().unwrap();
    let _log = write_run(dir.path(), "private-name", 2);
    let token = Token::new(TOKEN, "test").unwrap();
    let dashboard = Dashboard::start(Options { token: Some(token), ..options(dir.path()) }).unwrap();
    let at = dashboard.address();
    assert!(!dashboard.url().contains(TOKEN), "who gave the token knows it");
    for path in [
        "/",
        "/api/runs",
        "/api/wait",
        "/api/runs/0",
        "/metrics",
        "/assets/main.js",
        "/?token=wrong-wrong-wrong",
        "/x",
    ] {
        let answer = get(at, path);
        assert_eq!(answer.status, 401, "{path}");
        assert!(!answer.body.contains("private-name"), "{path}: {}", answer.body);
    }
    let health = get(at, "/healthz");
    assert!(health.status == 200 && !health.body.contains("private-name"));
    let redirect = get(at, &format!("/?token={TOKEN}"));
    assert_eq!(redirect.status, 303);
    let (_, cookie) = redirect.head.split_once("Set-Cookie: ").unwrap();
    let cookie = cookie.split(';').next().unwrap();
    assert!(!redirect.head.contains(TOKEN), "{}", redirect.head);
    assert_eq!(get_with(at, "/", &format!("Cookie: other=1; {cookie}\r\n")).status, 200);
    assert_eq!(get_with(at, "/api/runs", &format!("Cookie: {cookie}\r\n")).status, 200);
    assert_eq!(get_with(at, "/api/runs", &format!("Cookie: {cookie}0\r\n")).status, 401);
    assert_eq!(get_with(at, "/metrics", &format!("Authorization: Bearer {TOKEN}\r\n")).status, 200);
    assert_eq!(get_with(at, "/metrics", "Authorization: Bearer wrong-wrong-wrong\r\n").status, 401);
}

#[test]
fn another_address_gets_a_token_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let everywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let dashboard = Dashboard::start(Options { address: everywhere, ..options(dir.path()) }).unwrap();
    let at = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), dashboard.address().port());
    assert_eq!(get(at, "/api/runs").status, 401);
    let url = dashboard.url();
    let (host, token) = url.strip_prefix("http://").unwrap().split_once("/?token=").unwrap();
    assert_eq!(host, format!("box:{}", at.port()));
    assert_eq!(get_with(at, "/api/runs", &format!("Authorization: Bearer {token}\r\n")).status, 200);
}

#[test]
fn names_of_other_machines_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let hosts = vec!["train.example".to_owned()];
    let dashboard = Dashboard::start(Options { hosts, ..options(dir.path()) }).unwrap();
    let at = dashboard.address();
    let of = |host: &str, path: &str| {
        send(at, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).status
    };
    for host in ["localhost:1", "127.0.0.1", "[::1]:9", "box", "TRAIN.example:80"] {
        assert_eq!(of(host, "/api/runs"), 200, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", ""] {
        assert_eq!(of(host, "/api/runs"), 421, "{host}");
    }
    assert_eq!(of("probe.example", "/healthz"), 200);
    assert_eq!(send(at, "GET / HTTP/1.1\r\nConnection: close\r\n\r\n").status, 421);
    assert_eq!(get_with(at, "/api/runs", "Sec-Fetch-Site: cross-site\r\n").status, 403);
}

#[test]
fn no_path_leads_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("secret.txt"), "hidden-content").unwrap();
    let run = dir.path().join("run");
    let _log = write_run(&run, "run", 2);
    // A folder of somebody else, with links to files of this user.
    std::os::unix::fs::symlink(dir.path().join("secret.txt"), run.join("completions.jsonl")).unwrap();
    std::fs::remove_file(run.join("logs/training.log")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("secret.txt"), run.join("logs/training.log")).unwrap();
    let dashboard = Dashboard::start(options(dir.path())).unwrap();
    let at = dashboard.address();
    for path in [
        "/../secret.txt",
        "/assets/../../secret.txt",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/%2e%2e/secret.txt",
        "/api/runs/../secret.txt",
        "/api/runs/0/../../secret.txt",
        "/api/runs/0/timelines/..%2f..%2fsecret.txt",
        "/api/runs/-1",
        "/api/runs/99999999999999999999",
        "//secret.txt",
        "/run/run.json",
    ] {
        let answer = get(at, path);
        assert_eq!(answer.status, 404, "{path}: {}", answer.body);
    }
    for path in ["/api/runs/0/log", "/api/runs/0/completions"] {
        let answer = get(at, path);
        assert!(!answer.body.contains("hidden-content"), "{path}: {}", answer.body);
    }
}

#[test]
fn bad_requests_are_answered_and_closed() {
    let dir = tempfile::tempdir().unwrap();
    let dashboard = Dashboard::start(options(dir.path())).unwrap();
    let at = dashboard.address();
    let long = "x".repeat(20_000);
    assert_eq!(send(at, &format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n")).status, 431);
    let many: String = (0..100).map(|i| format!("X{i}: 1\r\n")).collect();
    assert_eq!(send(at, &format!("GET / HTTP/1.1\r\nHost: localhost\r\n{many}\r\n")).status, 431);
    assert_eq!(send(at, "nonsense\r\n\r\n").status, 400);
    assert_eq!(send(at, "\u{16}\u{3}\u{1} TLS\r\n\r\n").status, 400);
    let post = "POST /api/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc";
    assert_eq!(send(at, post).status, 413);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let answer =
            send(at, &format!("{method} /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
        assert!(answer.status == 405 && answer.head.contains("Allow: GET, HEAD\r\n"), "{method}");
    }
    // A request of which only a part ever comes.
    let slow = send(at, "GET / HTTP/1.1\r\nHost: local");
    assert_eq!(slow.status, 408);
}

#[test]
fn connections_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let dashboard = Dashboard::start(options(dir.path())).unwrap();
    let at = dashboard.address();
    let idle: Vec<TcpStream> = (0..64).map(|_| connect(at)).collect();
    let refused = get(at, "/healthz");
    assert!(refused.status == 503 && refused.head.contains("Retry-After: 5\r\n"), "{}", refused.head);
    for stream in &idle {
        stream.shutdown(Shutdown::Both).unwrap();
    }
    drop(idle);
    let start = std::time::Instant::now();
    while get(at, "/healthz").status != 200 {
        assert!(start.elapsed() < DEADLINE, "closed connections make room");
        std::thread::yield_now();
    }
}

#[test]
fn new_points_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let dashboard = Dashboard::start(options(dir.path())).unwrap();
    let at = dashboard.address();
    let empty = get(at, "/api/runs").json();
    assert_eq!(empty["runs"], serde_json::json!([]));
    // A run that begins after the server.
    let mut log = write_run(dir.path(), "live", 3);
    let mut revision = empty["revision"].as_u64().unwrap();
    let mut changed = |until: &dyn Fn(&Value) -> bool| {
        let start = std::time::Instant::now();
        loop {
            let list = get(at, &format!("/api/wait?revision={revision}")).json();
            revision = list["revision"].as_u64().unwrap();
            if until(&list) {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "{list}");
        }
    };
    changed(&|list| list["runs"][0]["step"] == 3);
    let path = |rest: &str| format!("/api/runs/0/series?keys=loss{rest}");
    let first = get(at, &path("")).json();
    assert_eq!(first["rows"], 4);
    log.step(&record(4)).unwrap();
    changed(&|list| list["runs"][0]["step"] == 4);
    let generation = first["generation"].as_u64().unwrap();
    let new = get(at, &path(&format!("&after=4&generation={generation}"))).json();
    assert_eq!((&new["from_row"], &new["series"][0]["x"]), (&4.into(), &serde_json::json!([4])));
    // A run that is started anew in the folder: the page must not add to what it has.
    drop(log);
    let _log = write_run(dir.path(), "live", 2);
    changed(&|list| list["runs"][0]["step"] == 2);
    let new = get(at, &path(&format!("&after=5&generation={generation}"))).json();
    assert_eq!((&new["from_row"], &new["series"][0]["x"]), (&0.into(), &serde_json::json!([1, 2])));
}

#[test]
fn health_reports_a_stalled_run() {
    let dir = tempfile::tempdir().unwrap();
    let dashboard = Dashboard::start(options(dir.path())).unwrap();
    let at = dashboard.address();
    assert_eq!(get(at, "/healthz").body, "starting\n");
    let log = write_run(dir.path(), "first", 2);
    drop(log);
    let past = std::time::SystemTime::now() - Duration::from_secs(3600);
    for name in ["metrics.jsonl", "logs/training.log"] {
        std::fs::File::options()
            .append(true)
            .open(dir.path().join(name))
            .unwrap()
            .set_modified(past)
            .unwrap();
    }
    let start = std::time::Instant::now();
    let mut health = get(at, "/healthz");
    while health.status == 200 {
        assert!(start.elapsed() < DEADLINE, "{}", health.body);
        std::thread::sleep(Duration::from_millis(50));
        health = get(at, "/healthz");
    }
    assert_eq!(health.status, 503);
    assert!(health.body.starts_with("stalled: run 0 has written nothing for 36"), "{}", health.body);
    assert_eq!(get(at, "/healthz?stalled_after=7200").body, "ok\n");
}

#[test]
fn a_port_in_use_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let first = Dashboard::start(options(dir.path())).unwrap();
    let port = first.address().port();
    let error = Dashboard::start(Options { port: Some(port), ..options(dir.path()) }).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with(&format!("cannot serve the dashboard at 127.0.0.1:{port}: ")), "{text}");
    assert!(lockstep_core::Fault::hint(&error).unwrap().contains("0 for any"));
    drop(first);
    assert!(
        Dashboard::start(Options { port: Some(port), ..options(dir.path()) }).is_ok(),
        "dropping it frees the port"
    );
}
