//! Endpoints, right and wrong: small servers on this machine.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use lockstep_core::Fault as _;
use lockstep_rewards::{
    Http, RewardContext, RewardError, RewardFunction, RewardSpec, RewardToken, ScoreReport, open,
};

use crate::support::{PATIENT_S, SHORT_S, failure, score};

/// Answers one connection after the other with these texts, and passes on what it got. Stops after the last.
fn serve(answers: Vec<String>) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/score?key=hidden", listener.local_addr().unwrap());
    let (sender, requests) = channel();
    std::thread::spawn(move || {
        for answer in answers {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let _ = sender.send(read_request(&mut stream));
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    (url, requests)
}

fn read_request(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let request = String::from_utf8_lossy(&text).into_owned();
        if let Some((head, body)) = request.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
            });
            if body.len() >= length.unwrap_or(0) {
                return request;
            }
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return request,
            Ok(count) => text.extend_from_slice(&buffer[..count]),
        }
    }
}

fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

fn endpoint(url: &str, timeout_s: f64) -> Box<dyn RewardFunction> {
    let token = RewardToken::new("hunter2");
    let spec = RewardSpec::Http(Http { url: url.into(), timeout_s, token });
    open("endpoint", &spec, &RewardContext::default()).unwrap()
}

/// The report on three samples if the endpoint answers with this.
fn answered(answers: Vec<String>) -> ScoreReport {
    let (url, _requests) = serve(answers);
    score(&mut *endpoint(&url, PATIENT_S), 3)
}

#[test]
fn rewards_come_in_order() {
    let (url, requests) = serve(vec![answer("200 OK", r#"{"rewards": [1, null, -0.5]}"#)]);
    let report = score(&mut *endpoint(&url, PATIENT_S), 3);
    assert!(report.failures.is_empty(), "{report:?}");
    assert_eq!(report.rewards, [Some(1.0), None, Some(-0.5)]);
    let request = requests.recv().unwrap();
    assert!(request.starts_with("POST /score?key=hidden HTTP/1.1\r\n"), "{request}");
    let lower = request.to_ascii_lowercase();
    assert!(lower.contains("authorization: bearer hunter2\r\n"), "{request}");
    assert!(lower.contains("content-type: application/json\r\n"), "{request}");
    let body: serde_json::Value = serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap();
    let samples = body["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 3);
    assert_eq!(samples[1]["completion"], "c1");
    assert_eq!(samples[1]["columns"]["answer"], 1);
    assert!(samples[1].get("id").is_none());
}

#[test]
fn wrong_answers() {
    for (body, expected) in [
        ("<html>", "answered with something else than rewards"),
        ("[1, 2, 3]", "(it has no list `rewards`): [1, 2, 3]"),
        (r#"{"rewards": [1, 2]}"#, "answered with 2 rewards for 3 samples"),
        (r#"{"rewards": []}"#, "answered with 0 rewards for 3 samples"),
    ] {
        let (text, samples) = failure(&answered(vec![answer("200 OK", body)]));
        assert!(text.contains(expected) && samples == [0, 1, 2], "{text}");
    }
    let (text, _) = failure(&answered(vec![answer("200 OK", &"1".repeat(100_000))]));
    assert!(text.contains("answered with more than 65728 bytes"), "{text}");
}

#[test]
fn bad_numbers_concern_their_samples_only() {
    let report = answered(vec![answer("200 OK", r#"{"rewards": [NaN, null, 2]}"#)]);
    let (text, samples) = failure(&report);
    assert!(text.contains("a reward that is not a finite number: NaN"), "{text}");
    assert_eq!((samples, report.rewards), (vec![0], vec![None, None, Some(2.0)]));
    let report = answered(vec![answer("200 OK", r#"{"rewards": [1, "2", true]}"#)]);
    let (text, samples) = failure(&report);
    assert!(text.contains("the text \"2\" as a reward, expected a number or null"), "{text}");
    assert_eq!(samples, [1, 2]);
}

#[test]
fn statuses_are_errors_without_the_token() {
    let report = answered(vec![answer("401 Unauthorized", "bad token hunter2\n")]);
    let (text, _) = failure(&report);
    assert!(text.ends_with("answered with status 401: bad token [hidden]"), "{text}");
    assert!(!text.contains("key=hidden"), "{text}");
    let error = &report.failures[0].error;
    assert!(!format!("{error:?}").contains("hunter2"));
    assert!(error.hint().unwrap().contains("environment variable"));
    assert_eq!(error.class().exit_code(), 77);

    let redirect =
        "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n";
    let report = answered(vec![redirect.into()]);
    assert!(failure(&report).0.ends_with("answered with status 307"), "{report:?}");
}

#[test]
fn a_busy_endpoint_gets_a_second_request() {
    let busy = || answer("503 Service Unavailable", "");
    let report = answered(vec![busy(), busy(), answer("200 OK", r#"{"rewards": [1, 1, 1]}"#)]);
    assert_eq!(report.rewards, [Some(1.0); 3], "{report:?}");
    let (text, _) = failure(&answered(vec![busy(), busy(), busy()]));
    assert!(text.ends_with("answered with status 503"), "{text}");
}

#[test]
fn a_hanging_endpoint_is_not_waited_for() {
    // Accepts nothing: the system completes the connection, and nobody answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let begin = Instant::now();
    let report = score(&mut *endpoint(&url, SHORT_S), 1);
    assert!(begin.elapsed() < Duration::from_secs(10));
    let (text, _) = failure(&report);
    assert!(text.ends_with("did not answer in 1 s"), "{text}");
    assert!(report.failures[0].error.hint().unwrap().contains("timeout_s"));
}

#[test]
fn an_endpoint_that_is_not_there() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let (text, samples) = failure(&score(&mut *endpoint(&url, PATIENT_S), 2));
    assert!(text.contains("cannot be reached: "), "{text}");
    assert_eq!(samples, [0, 1]);
}

#[test]
fn an_answer_that_breaks_off() {
    let cut = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"rewards\"".to_owned();
    let (text, _) = failure(&answered(vec![cut.clone(), cut.clone(), cut]));
    assert!(text.contains("cannot be reached: "), "{text}");
}

#[test]
fn urls_are_checked_and_not_printed() {
    for url in ["", "ftp://host/", "host/path", "http://user:hunter2@host/", "http://ho st/"] {
        let error = RewardSpec::Http(Http::new(url)).check("endpoint").unwrap_err();
        assert!(matches!(error, RewardError::BadOption { option: "url", .. }), "{error}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }
    assert!(
        RewardSpec::Http(Http { timeout_s: -1.0, ..Http::new("http://host/") }).check("endpoint").is_err()
    );
}
