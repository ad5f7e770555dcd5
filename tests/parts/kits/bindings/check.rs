//! What a program in Rust gets from the library: `check BUNDLE BROKEN...`. Each line is a fact.
use attn_export::{Bundle, Fact, Result, Session};

fn ready(bundle: &Bundle) -> Result<Session> {
    let mut session = bundle.session()?;
    session.set_input("query", &[1, 4, 16], vec![0.5f32; 64])?;
    session.prefill(64, None)?;
    session.set_input("query", &[1, 1, 16], vec![0.25f32; 16])?;
    Ok(session)
}

/// Runs steps that go back before the cache is full; returns an element of the last output.
fn steps(session: &mut Session, count: i64) -> Result<f32> {
    for _ in 0..count {
        if session.get(Fact::Held)? == 64 { session.rewind(60)? }
        session.input_mut::<f32>("query")?[0] = 0.5;
        session.step()?;
    }
    Ok(session.output::<f32>("output")?.1[0])
}

fn code<T>(of: Result<T>) -> i32 { of.err().map_or(0, |error| error.code) }

fn try_bundle(folder: &str) -> Result<()> {
    let bundle = Bundle::open(folder, None, 1, false)?;
    for index in 0..bundle.get(Fact::Cases)? {
        let (passed, text) = bundle.test_case(index)?;
        if !passed { return Err(attn_export::Error { code: 8, text }) }
    }
    Ok(())
}

fn resident() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn main() -> Result<()> {
    let folders: Vec<String> = std::env::args().skip(1).collect();
    let bundle = Bundle::open(&folders[0], None, 1, false)?;
    let mut fresh = bundle.session()?;
    println!("step without a prefill: {}", code(fresh.step()));
    println!("wrong size: {}", code(fresh.set_input("query", &[1, 1, 15], vec![0f32; 15])));
    println!("wrong bytes: {}", code(fresh.set_input("query", &[1, 2, 16], vec![0f32; 16])));
    println!("wrong type: {}", code(fresh.set_input("query", &[1, 1, 16], vec![0f64; 16])));
    println!("wrong row: {}", code(ready(&bundle)?.fork(&[1])));
    println!("output before a run: {}", code(fresh.output::<f32>("output")));
    for folder in &folders[1..] { println!("broken: {}", code(try_bundle(folder))) }
    let together: Vec<f32> = std::thread::scope(|scope| {
        let run = || { let mut session = ready(&bundle).unwrap(); steps(&mut session, 200).unwrap() };
        let threads = [scope.spawn(run), scope.spawn(run)];
        threads.map(|thread| thread.join().unwrap()).to_vec()
    });
    println!("two threads agree: {}", together[0] == together[1]);
    let mut session = ready(&bundle)?;
    drop(bundle); // its sessions still work
    steps(&mut session, 1000)?;
    let before = resident();
    steps(&mut session, 10000)?;
    println!("copied: {}", session.get(Fact::Copied)?);
    println!("grown: {}", resident() - before);
    Ok(())
}
