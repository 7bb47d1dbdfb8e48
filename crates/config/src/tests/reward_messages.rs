//! The texts of errors of rewards. Each snapshot is the whole text that a user sees.

use insta::assert_snapshot;

use super::refused;

fn grpo(text: &str) -> String {
    refused(&format!("algorithm: grpo\nreward_funcs: format\n{text}"), &[])
}

fn rewards(text: &str) -> String {
    refused(&format!("algorithm: grpo\nreward_funcs: {text}\n"), &[])
}

#[test]
fn no_reward() {
    assert_snapshot!(refused("algorithm: grpo\n", &[]), @r"
    `reward_funcs` is missing: grpo and rloo need a reward: set `reward_funcs` to built-in functions (exact_match, numeric_match, format, regex, length_penalty, repetition_penalty), to a program such as `{program: [python3, reward.py]}` or to an endpoint such as `{http: 'http://127.0.0.1:8000/reward'}`, or set `reward_model_path` to a reward model
    ");
    assert_snapshot!(refused("algorithm: rloo\nreward_weights: [1]\n", &[]), @r"
    `reward_funcs` is missing: grpo and rloo need a reward: set `reward_funcs` to built-in functions (exact_match, numeric_match, format, regex, length_penalty, repetition_penalty), to a program such as `{program: [python3, reward.py]}` or to an endpoint such as `{http: 'http://127.0.0.1:8000/reward'}`, or set `reward_model_path` to a reward model
    ");
}

#[test]
fn unknown_rewards() {
    assert_snapshot!(rewards("exact_mach"), @r"
    run.yaml:4:15: `reward_funcs` cannot be `exact_mach`
      |
    4 | reward_funcs: exact_mach
      |               ^^^^^^^^^^
      hint: did you mean `exact_match`? Possible values: exact_match, numeric_match, format, regex, length_penalty, repetition_penalty, program, http.
    ");
    assert_snapshot!(rewards("[my_rewards.py]"), @r"
    run.yaml:4:16: `reward_funcs` must be the name of a built-in function, or a map such as `{program: [python3, reward.py]}`, found my_rewards.py
      |
    4 | reward_funcs: [my_rewards.py]
      |                ^^^^^^^^^^^^^
      hint: to use Python, write a program: `{program: [python3, reward.py]}`. It reads completions and writes rewards as lines of JSON.
    ");
    assert_snapshot!(rewards("my_package.rewards.accuracy"), @r"
    run.yaml:4:15: `reward_funcs` must be the name of a built-in function, or a map such as `{program: [python3, reward.py]}`, found my_package.rewards.accuracy
      |
    4 | reward_funcs: my_package.rewards.accuracy
      |               ^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: to use Python, write a program: `{program: [python3, reward.py]}`. It reads completions and writes rewards as lines of JSON.
    ");
    assert_snapshot!(rewards("accuracy_reward"), @r"
    run.yaml:4:15: `reward_funcs: accuracy_reward` is not implemented yet
      |
    4 | reward_funcs: accuracy_reward
      |               ^^^^^^^^^^^^^^^
      hint: use exact_match, numeric_match, format, length_penalty or repetition_penalty.
    ");
    assert_snapshot!(rewards("org/reward-model"), @r"
    run.yaml:4:15: `reward_funcs` must be the name of a built-in function, or a map such as `{program: [python3, reward.py]}`, found org/reward-model
      |
    4 | reward_funcs: org/reward-model
      |               ^^^^^^^^^^^^^^^^
      hint: use `reward_model_path` for a model.
    ");
    assert_snapshot!(rewards("[[format]]"), @r"
    run.yaml:4:16: `reward_funcs` expects the name of a built-in function, or a map such as `{program: [python3, reward.py]}`, found a list
      |
    4 | reward_funcs: [[format]]
      |                ^
    ");
    assert_snapshot!(rewards("{format: {}, regex: a}"), @r"
    run.yaml:4:15: `reward_funcs` expects a map with one key, the function, such as `{format: {}}`, found a map
      |
    4 | reward_funcs: {format: {}, regex: a}
      |               ^
    ");
    assert_snapshot!(rewards("[format, format]"), @r"
    run.yaml:4:24: `reward_funcs` must be functions with different names, found format
      |
    4 | reward_funcs: [format, format]
      |                        ^^^^^^
      hint: give one of them another name: `{format: {name: second_format}}`, for example.
    ");
}

#[test]
fn options_of_rewards() {
    assert_snapshot!(rewards("regex"), @r"
    run.yaml:4:15: `reward_funcs.regex` needs the option `pattern`
      |
    4 | reward_funcs: regex
      |               ^^^^^
      hint: write `{regex: {pattern: '^[0-9]+$'}}`, for example.
    ");
    assert_snapshot!(rewards("[{exact_match: {colum: a}}, {format: [a]}]"), @r"
    run.yaml:4:31: unknown key `reward_funcs.exact_match.colum`
      |
    4 | reward_funcs: [{exact_match: {colum: a}}, {format: [a]}]
      |                               ^^^^^
      hint: did you mean `column`?

    error: run.yaml:4:52: `reward_funcs.format` expects a map of options, found a list
      |
    4 | reward_funcs: [{exact_match: {colum: a}}, {format: [a]}]
      |                                                    ^

    error: the configuration has 2 errors
    ");
    assert_snapshot!(rewards("[{exact_match: {ignore_case: 2, name: 'a b'}}]"), @r"
    run.yaml:4:44: `reward_funcs.exact_match.ignore_case` expects true or false, found `2`
      |
    4 | reward_funcs: [{exact_match: {ignore_case: 2, name: 'a b'}}]
      |                                            ^

    error: run.yaml:4:53: `reward_funcs.exact_match.name` must be letters, digits, dots, dashes and underscores, found a b
      |
    4 | reward_funcs: [{exact_match: {ignore_case: 2, name: 'a b'}}]
      |                                                     ^^^^^

    error: the configuration has 2 errors
    ");
    assert_snapshot!(rewards("{repetition_penalty: {ngram_size: 0, max_penalty: 1}}"), @r"
    run.yaml:4:49: `reward_funcs.repetition_penalty.ngram_size` must be at least 1, found 0
      |
    4 | reward_funcs: {repetition_penalty: {ngram_size: 0, max_penalty: 1}}
      |                                                 ^

    error: run.yaml:4:65: `reward_funcs.repetition_penalty.max_penalty` must be at most 0, found 1
      |
    4 | reward_funcs: {repetition_penalty: {ngram_size: 0, max_penalty: 1}}
      |                                                                 ^

    error: the configuration has 2 errors
    ");
}

#[test]
fn options_of_programs_and_endpoints() {
    assert_snapshot!(rewards("{program: {}}"), @r"
    run.yaml:4:25: `reward_funcs.program` needs the option `command`
      |
    4 | reward_funcs: {program: {}}
      |                         ^
      hint: write `{program: {command: [python3, reward.py]}}`, for example.
    ");
    assert_snapshot!(rewards("{program: {command: [], timeout: 0, workers: 0, env: [A B]}}"), @r"
    run.yaml:4:35: `reward_funcs.program.command` expects a program and its arguments, such as `[python3, reward.py]`, found a list
      |
    4 | reward_funcs: {program: {command: [], timeout: 0, workers: 0, env: [A B]}}
      |                                   ^

    error: run.yaml:4:48: `reward_funcs.program.timeout` must be above 0 seconds, found 0
      |
    4 | reward_funcs: {program: {command: [], timeout: 0, workers: 0, env: [A B]}}
      |                                                ^

    error: run.yaml:4:60: `reward_funcs.program.workers` must be at least 1, found 0
      |
    4 | reward_funcs: {program: {command: [], timeout: 0, workers: 0, env: [A B]}}
      |                                                            ^

    error: run.yaml:4:68: `reward_funcs.program.env` must be names of environment variables, or `NAME=value`, found [A B]
      |
    4 | reward_funcs: {program: {command: [], timeout: 0, workers: 0, env: [A B]}}
      |                                                                    ^

    error: the configuration has 4 errors
    ");
    assert_snapshot!(rewards("{program: \"cat | sort\"}"), @r#"
    run.yaml:4:25: `reward_funcs.program.command` must be a list of words if it has quotes or special characters, found cat | sort
      |
    4 | reward_funcs: {program: "cat | sort"}
      |                         ^^^^^^^^^^^^
      hint: there is no shell; write `[sh, -c, '…']` to use one.
    "#);
    assert_snapshot!(rewards("{program: {command: a, env: [API_KEY=s3cret-key]}}"), @r"
    run.yaml:4:43: `reward_funcs.program.env` must be variables that are not secrets, found [hidden]
      |
    4 | reward_funcs: {program: {command: a, env: [API_KEY=[hidden]]}}
      |                                           ^
      hint: the program can read a secret from a file.
    ");
    assert_snapshot!(rewards("{http: localhost}"), @r"
    run.yaml:4:22: `reward_funcs.http.url` must be a URL that starts with http:// or https://, found localhost
      |
    4 | reward_funcs: {http: localhost}
      |                      ^^^^^^^^^
    ");
    assert_snapshot!(rewards("{http: {url: 'http://a', token_env: my-s3cret}}"), @r"
    run.yaml:4:51: `reward_funcs.http.token_env` must be the name of an environment variable, in upper case, found [hidden]
      |
    4 | reward_funcs: {http: {url: 'http://a', token_env: my-s3cret}}
      |                                                   ^^^^^^^^^
    ");
    assert_snapshot!(rewards("[{numeric_match: {source: first}}, {length_penalty: {max_length: 4, buffer: 5}}]"), @r"
    run.yaml:4:41: `reward_funcs.numeric_match.source` must be last or boxed, found first
      |
    4 | reward_funcs: [{numeric_match: {source: first}}, {length_penalty: {max_length: 4, buffer: 5}}]
      |                                         ^^^^^

    error: run.yaml:4:67: `reward_funcs.length_penalty.buffer` must be at most `max_length` (4), found 5
      |
    4 | reward_funcs: [{numeric_match: {source: first}}, {length_penalty: {max_length: 4, buffer: 5}}]
      |                                                                   ^

    error: the configuration has 2 errors
    ");
    assert_snapshot!(rewards("{http: {url: 'http://me:s3cret@host/a', token: s3cret-token}}"), @r"
    run.yaml:4:28: `reward_funcs.http.url` must be without user name and password, found http://[hidden]@host/a
      |
    4 | reward_funcs: {http: {url: 'http://[hidden]@host/a', token: [hidden]}}
      |                            ^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: `token_env` names the environment variable with a bearer token.

    error: run.yaml:4:55: unknown key `reward_funcs.http.token`
      |
    4 | reward_funcs: {http: {url: 'http://[hidden]@host/a', token: [hidden]}}
      |                                                  ^^^^^
      hint: did you mean `token_env`?

    error: the configuration has 2 errors
    ");
}

#[test]
fn weights_of_rewards() {
    assert_snapshot!(grpo("reward_weights: [1, 2]\n"), @r"
    run.yaml:5:17: `reward_weights` must be a number for each of `reward_funcs` (1), found [1, 2]
      |
    5 | reward_weights: [1, 2]
      |                 ^
    ");
    assert_snapshot!(grpo("reward_model_path: rm\nreward_weights: [1]\nreward_on_error: ignore\n"), @r"
    run.yaml:6:17: `reward_weights` must be a number for each of `reward_funcs` and one for `reward_model_path` (2), found [1]
      |
    6 | reward_weights: [1]
      |                 ^

    error: run.yaml:7:18: `reward_on_error` cannot be `ignore`
      |
    7 | reward_on_error: ignore
      |                  ^^^^^^
      hint: possible values: stop, zero, skip.

    error: the configuration has 2 errors
    ");
}
