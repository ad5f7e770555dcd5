//! Tests the bundle, runs it on an array of your own, decodes, generates, and embeds.
use attn_export::{Bundle, Error, Fact, Result, Session};
use std::io::Write;
use std::time::Instant;

const USAGE: &str = "usage: attn self-test [BUNDLE] | run IN.npy BATCH OUT.npy | decode [TOKENS] | generate ID,ID,... [TOKENS] | embed ID,ID,...";
fn wrong(text: impl Into<String>) -> Error {
    Error { code: 2, text: text.into() }
}

fn open(folder: Option<&String>, spin: bool) -> Result<Bundle> {
    let ort = std::env::var("ORT_DYLIB_PATH").ok();
    Bundle::open(folder.map_or("bundle", |folder| folder), ort.as_deref(), 0, spin)
}

fn self_test(folder: Option<&String>) -> Result<bool> {
    let bundle = open(folder, false)?;
    let (count, mut good) = (bundle.get(Fact::Cases)?, 0);
    for index in 0..count {
        let (passed, line) = bundle.test_case(index)?;
        good += passed as i64;
        println!("{line}");
    }
    println!("{}: {good} of {count} passed, ONNX Runtime {}", bundle.name(), bundle.runtime_version());
    Ok(good == count)
}

/// Runs the bundle on the rows of a file, which are repeated until there are `batch`.
fn run(path: &str, batch: &str, out: &str) -> Result<bool> {
    let (bundle, rows) = (open(None, false)?, batch.parse().map_err(|_| wrong("BATCH is a number"))?);
    let (input, output) = (&bundle.inputs()?[0].name, &bundle.outputs()?[0].name);
    let mut session = bundle.session()?;
    session.load_input(input, path, rows)?;
    session.prefill(0, None)?;
    session.save_output(output, out)?;
    println!("{out}: {output} {:?}", session.output::<u8>(output)?.0);
    Ok(true)
}

/// Sets the inputs that a session does not make to zeros, for some tokens.
fn set_zeros(bundle: &Bundle, session: &mut Session, tokens: i64) -> Result<()> {
    for input in bundle.inputs()?.iter().filter(|input| input.needed) {
        let size = |(&dim, axis): (&i64, &String)| if dim >= 0 { dim } else if axis == "query_len" { tokens } else { 1 };
        let dims: Vec<i64> = input.dims.iter().zip(&input.axes).map(size).collect();
        let bytes = dims.iter().product::<i64>() as usize * input.element_bytes;
        session.set_input(&input.name, &dims, vec![0u8; bytes])?;
    }
    Ok(())
}

fn decode(tokens: i64) -> Result<bool> {
    let bundle = open(None, true)?;
    if bundle.get(Fact::Cache)? == 0 { println!("{} has no KV cache: there is nothing to decode", bundle.name()); return Ok(true) }
    let mut session = bundle.session()?;
    set_zeros(&bundle, &mut session, 8)?;
    session.prefill(8 + 64, None)?;
    set_zeros(&bundle, &mut session, 1)?;
    let start = Instant::now();
    for made in 0..tokens {
        // Your program would write the next token with `input_mut` here, and read `output`.
        if made > 0 && made % 64 == 0 { session.rewind(64)? }
        session.step()?;
    }
    println!("{tokens} tokens: {:.4} ms per token, {} held", start.elapsed().as_secs_f64() * 1e3 / tokens as f64, session.get(Fact::Held)?);
    Ok(true)
}

/// Reads ids with commas between them; what is no id is -1.
fn numbers(ids: &String) -> Vec<i64> {
    ids.split(',').filter(|id| !ids.is_empty() || !id.is_empty()).map(|id| id.parse().unwrap_or(-1)).collect()
}

/// Prints the vectors of texts, in each word the ids of one.
fn embed(words: &[String]) -> Result<bool> {
    let texts: Vec<Vec<i64>> = words.iter().map(numbers).collect();
    let vectors = open(None, false)?.embed(&texts, &[])?;
    for vector in vectors.chunks_exact(vectors.len() / texts.len()) {
        println!("{}", vector.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
    }
    Ok(true)
}

fn generate(ids: &String, count: &str) -> Result<bool> {
    let (bundle, mut between) = (open(None, true)?, "");
    let mut session = bundle.session()?;
    for token in session.generate(&numbers(ids), count.parse().unwrap_or(0))? {
        print!("{between}{}", token?);
        std::io::stdout().flush().ok();
        between = " ";
    }
    println!();
    Ok(true)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize, other: &str| words.get(at).map_or(other.to_string(), |word| word.clone());
    let done = match (word(0, "").as_str(), words.len()) {
        ("self-test", 1..=2) => self_test(words.get(1)),
        ("run", 4) => run(&words[1], &words[2], &words[3]),
        ("decode", 1..=2) => word(1, "64").parse().map_err(|_| wrong("TOKENS is a number")).and_then(decode),
        ("embed", 2..) => embed(&words[1..]),
        ("generate", 2..=3) => generate(&words[1], &word(2, "64")),
        _ => Err(wrong(USAGE)),
    };
    match done {
        Ok(good) => std::process::exit(if good { 0 } else { 1 }),
        Err(error) => { eprintln!("{error}"); std::process::exit(2) }
    }
}
