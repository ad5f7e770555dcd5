//! A bundle in ONNX Runtime, through the C library in `library/`; `attn_export.h` is its reference.
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_void};
use std::{fmt, iter, mem, ptr, slice};

const VERSION: u32 = 2;
/// What `get` tells.
pub enum Fact { Inputs = 0, Outputs = 1, Cases = 2, Cache = 3, Vocabulary = 4, MostTokens = 5, Width = 6, Held = 16, Copied = 17 }

#[repr(C)]
struct Raw {
    name: *const c_char,
    dtype: i32,
    element_bytes: i32,
    needed: i32,
    rank: i32,
    dims: [i64; 8],
    axes: [*const c_char; 8],
    data: *mut c_void,
    bytes: i64,
}

extern "C" {
    fn attn_last_error() -> *const c_char;
    fn attn_open(abi: u32, folder: *const c_char, ort: *const c_char, threads: i32, spin: i32, bundle: *mut u64) -> i32;
    fn attn_close(handle: u64) -> i32;
    fn attn_get(handle: u64, what: i32, value: *mut i64) -> i32;
    fn attn_text(bundle: u64, what: i32) -> *const c_char;
    fn attn_describe(bundle: u64, kind: i32, index: i64, value: *mut Raw) -> i32;
    fn attn_test_case(bundle: u64, index: i64, line: *mut c_char, size: i64) -> i32;
    fn attn_session(bundle: u64, session: *mut u64) -> i32;
    fn attn_set_input(session: u64, value: *mut Raw) -> i32;
    fn attn_load_input(session: u64, name: *const c_char, path: *const c_char, rows: i64) -> i32;
    fn attn_run(session: u64) -> i32;
    fn attn_output(session: u64, name: *const c_char, dtype: i32, value: *mut Raw) -> i32;
    fn attn_save_output(session: u64, name: *const c_char, path: *const c_char) -> i32;
    fn attn_prefill(session: u64, capacity: i64, lengths: *const i64, count: i64) -> i32;
    fn attn_step(session: u64) -> i32;
    fn attn_rewind(session: u64, tokens: i64) -> i32;
    fn attn_fork(session: u64, rows: *const i64, count: i64, fork: *mut u64) -> i32;
    fn attn_start(session: u64, ids: *const i64, length: i64, count: i64) -> i32;
    fn attn_next(session: u64, token: *mut i64) -> i32;
    fn attn_embed(bundle: u64, ids: *const i64, types: *const i64, total: i64, lengths: *const i64, count: i64, vectors: *mut f32, size: i64) -> i32;
}

/// A code of `attn_export.h`, and one line.
#[derive(Debug, Clone)]
pub struct Error { pub code: i32, pub text: String }
pub type Result<T> = std::result::Result<T, Error>;
impl std::error::Error for Error {}
impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result { to.write_str(&self.text) }
}

fn text(of: *const c_char) -> String {
    if of.is_null() { String::new() } else { unsafe { CStr::from_ptr(of) }.to_string_lossy().into_owned() }
}
fn wrong(text: &str) -> Error { Error { code: 2, text: text.into() } }
fn c_string(of: &str) -> Result<CString> { CString::new(of).map_err(|_| wrong("a text has a zero byte")) }
fn check(code: i32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error { code, text: text(unsafe { attn_last_error() }) }) }
}
fn get(handle: u64, what: Fact) -> Result<i64> {
    let mut value = 0;
    check(unsafe { attn_get(handle, what as i32, &mut value) }).map(|()| value)
}

/// An input or output. `dims` are fixed sizes, or -1 where `axes` has a name.
#[derive(Debug, Clone)]
pub struct Value { pub name: String, pub dtype: i32, pub element_bytes: usize, pub needed: bool, pub dims: Vec<i64>, pub axes: Vec<String> }

/// A type of elements: float16 and bfloat16 are u16, and the bytes of any type are u8.
pub trait Element: Copy + 'static { const DTYPE: i32; }
macro_rules! elements { ($($type:ty: $dtype:expr),*) => { $(impl Element for $type { const DTYPE: i32 = $dtype; })* } }
elements!(f32: 1, f64: 11, i64: 7, i32: 6, u32: 12, u64: 13, i16: 5, u16: 4, i8: 3, u8: 2);

/// An open bundle. Threads may share it.
pub struct Bundle(u64);

impl Bundle {
    /// Opens a folder. `ort`: the path of ONNX Runtime's library; None: where the system finds it.
    pub fn open(folder: &str, ort: Option<&str>, threads: i32, spin: bool) -> Result<Bundle> {
        let (folder, ort, mut handle) = (c_string(folder)?, ort.map(c_string).transpose()?, 0);
        let path = ort.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        check(unsafe { attn_open(VERSION, folder.as_ptr(), path, threads, spin as i32, &mut handle) }).map(|()| Bundle(handle))
    }
    pub fn get(&self, what: Fact) -> Result<i64> { get(self.0, what) }
    pub fn name(&self) -> String { text(unsafe { attn_text(self.0, 0) }) }
    pub fn runtime_version(&self) -> String { text(unsafe { attn_text(self.0, 1) }) }
    /// Tells the inputs; `outputs` the outputs.
    pub fn inputs(&self) -> Result<Vec<Value>> { (0..self.get(Fact::Inputs)?).map(|index| self.value(0, index)).collect() }
    pub fn outputs(&self) -> Result<Vec<Value>> { (0..self.get(Fact::Outputs)?).map(|index| self.value(1, index)).collect() }
    fn value(&self, kind: i32, index: i64) -> Result<Value> {
        let mut raw: Raw = unsafe { mem::zeroed() };
        check(unsafe { attn_describe(self.0, kind, index, &mut raw) })?;
        let rank = raw.rank as usize;
        let (dims, axes) = (raw.dims[..rank].to_vec(), raw.axes[..rank].iter().map(|&axis| text(axis)).collect());
        Ok(Value { name: text(raw.name), dtype: raw.dtype, element_bytes: raw.element_bytes as usize, needed: raw.needed != 0, dims, axes })
    }
    /// Runs a test case; returns whether it passed, and a line.
    pub fn test_case(&self, index: i64) -> Result<(bool, String)> {
        let mut line = [0 as c_char; 512];
        let code = unsafe { attn_test_case(self.0, index, line.as_mut_ptr(), 512) };
        if code != 8 { check(code)? }
        Ok((code == 0, text(line.as_ptr())))
    }
    /// Makes the vectors of texts of token ids, one after the other. `types`: those of all tokens; empty: 0.
    pub fn embed(&self, texts: &[Vec<i64>], types: &[i64]) -> Result<Vec<f32>> {
        let (ids, lengths): (_, Vec<i64>) = (texts.concat(), texts.iter().map(|text| text.len() as i64).collect());
        if !types.is_empty() && types.len() != ids.len() { return Err(wrong("types are not as many as ids")) }
        let mut vectors = vec![0f32; self.get(Fact::Width)? as usize * texts.len()];
        let types = if types.is_empty() { ptr::null() } else { types.as_ptr() };
        let (total, count, size) = (ids.len() as i64, texts.len() as i64, vectors.len() as i64);
        check(unsafe { attn_embed(self.0, ids.as_ptr(), types, total, lengths.as_ptr(), count, vectors.as_mut_ptr(), size) }).map(|()| vectors)
    }
    pub fn session(&self) -> Result<Session> {
        let mut handle = 0;
        check(unsafe { attn_session(self.0, &mut handle) }).map(|()| Session { handle, arrays: HashMap::new() })
    }
}

impl Drop for Bundle { fn drop(&mut self) { unsafe { attn_close(self.0); } } }

/// What an input points to. It is reached through this pointer alone.
struct Array { data: *mut c_void, count: usize, element: usize, free: unsafe fn(*mut c_void, usize) }

unsafe fn free<T>(data: *mut c_void, count: usize) { drop(Box::from_raw(ptr::slice_from_raw_parts_mut(data as *mut T, count))) }

impl Drop for Array { fn drop(&mut self) { unsafe { (self.free)(self.data, self.count) } } }

/// Inputs, outputs, and the caches in between.
pub struct Session { handle: u64, arrays: HashMap<String, Array> }
unsafe impl Send for Session {}

impl Session {
    /// Sets an input; its elements move into the session.
    pub fn set_input<T: Element>(&mut self, name: &str, dims: &[i64], elements: Vec<T>) -> Result<()> {
        let (c_name, count, mut raw): (_, _, Raw) = (c_string(name)?, elements.len(), unsafe { mem::zeroed() });
        raw.name = c_name.as_ptr();
        raw.data = Box::into_raw(elements.into_boxed_slice()) as *mut c_void;
        let array = Array { data: raw.data, count, element: mem::size_of::<T>(), free: free::<T> };
        (raw.dtype, raw.rank, raw.bytes) = (T::DTYPE, dims.len() as i32, (count * mem::size_of::<T>()) as i64);
        for (to, from) in raw.dims.iter_mut().zip(dims) { *to = *from }
        check(unsafe { attn_set_input(self.handle, &mut raw) })?;
        self.arrays.insert(name.into(), array);
        Ok(())
    }
    /// Sets an input to the rows of a .npy file, again from the first until there are `rows`.
    pub fn load_input(&mut self, name: &str, path: &str, rows: i64) -> Result<()> {
        let (c_name, c_path) = (c_string(name)?, c_string(path)?);
        check(unsafe { attn_load_input(self.handle, c_name.as_ptr(), c_path.as_ptr(), rows) })?;
        self.arrays.remove(name);
        Ok(())
    }
    /// The elements of an input that was set, to write the next ones into.
    pub fn input_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T]> {
        let array = self.arrays.get(name).ok_or_else(|| wrong(&format!("{name} is not set")))?;
        if array.element != mem::size_of::<T>() { return Err(wrong(&format!("{name} was set with another type"))) }
        Ok(unsafe { slice::from_raw_parts_mut(array.data as *mut T, array.count) })
    }
    /// An output of the last run, in place: its sizes and elements.
    pub fn output<T: Element>(&self, name: &str) -> Result<(Vec<i64>, &[T])> {
        let (c_name, mut raw): (_, Raw) = (c_string(name)?, unsafe { mem::zeroed() });
        check(unsafe { attn_output(self.handle, c_name.as_ptr(), T::DTYPE, &mut raw) })?;
        let count = raw.bytes as usize / mem::size_of::<T>();
        let elements = if count == 0 { &[] } else { unsafe { slice::from_raw_parts(raw.data as *const T, count) } };
        Ok((raw.dims[..raw.rank as usize].to_vec(), elements))
    }
    /// Writes an output of the last run to a .npy file.
    pub fn save_output(&self, name: &str, path: &str) -> Result<()> {
        let (name, path) = (c_string(name)?, c_string(path)?);
        check(unsafe { attn_save_output(self.handle, name.as_ptr(), path.as_ptr()) })
    }
    pub fn get(&self, what: Fact) -> Result<i64> { get(self.handle, what) }
    pub fn run(&mut self) -> Result<()> { check(unsafe { attn_run(self.handle) }) }
    pub fn step(&mut self) -> Result<()> { check(unsafe { attn_step(self.handle) }) }
    pub fn rewind(&mut self, tokens: i64) -> Result<()> { check(unsafe { attn_rewind(self.handle, tokens) }) }
    /// `lengths`: of each row its tokens without the padding on the right; None: all.
    pub fn prefill(&mut self, capacity: i64, lengths: Option<&[i64]>) -> Result<()> {
        let (start, count) = lengths.map_or((ptr::null(), 0), |rows| (rows.as_ptr(), rows.len() as i64));
        check(unsafe { attn_prefill(self.handle, capacity, start, count) })
    }
    pub fn fork(&mut self, rows: &[i64]) -> Result<Session> {
        let mut handle = 0;
        check(unsafe { attn_fork(self.handle, rows.as_ptr(), rows.len() as i64, &mut handle) })?;
        Ok(Session { handle, arrays: HashMap::new() })
    }
    /// Continues a text of token ids by at most `count` tokens.
    pub fn generate(&mut self, ids: &[i64], count: i64) -> Result<impl Iterator<Item = Result<i64>> + '_> {
        check(unsafe { attn_start(self.handle, ids.as_ptr(), ids.len() as i64, count) })?;
        Ok(iter::from_fn(move || {
            let mut token = 0;
            let code = unsafe { attn_next(self.handle, &mut token) };
            if code == 1 { None } else { Some(check(code).map(|()| token)) }
        }))
    }
}

impl Drop for Session { fn drop(&mut self) { unsafe { attn_close(self.handle); } } }
