//! Links the library that CMake has built in `library/build`.
fn main() {
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap() + "/library/build";
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib=attn_export");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    println!("cargo:rerun-if-changed=build.rs");
}
