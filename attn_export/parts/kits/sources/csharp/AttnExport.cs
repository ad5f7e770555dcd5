using System;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text;

/// <summary>A code of attn_export.h, and one line.</summary>
public sealed class AttnException : Exception
{
    public readonly int Code;
    public AttnException(int code, string text) : base(text) { Code = code; }
}

/// <summary>What Get tells.</summary>
public enum Fact { Inputs = 0, Outputs = 1, Cases = 2, Cache = 3, Vocabulary = 4, MostTokens = 5, Width = 6, Held = 16, Copied = 17 }

/// <summary>An input or output: its fixed sizes, or -1 where an axis has a name.</summary>
public sealed class Value
{
    public string Name; public int DType, ElementBytes; public bool Needed; public long[] Dims; public string[] Axes;
}

/// <summary>The C library in library/; attn_export.h is its reference.</summary>
internal static class Native
{
    public const int Version = 2, End = 1, Argument = 2, Mismatch = 8;
    private const string Library = "attn_export";

    [StructLayout(LayoutKind.Sequential)]
    public struct Raw
    {
        public IntPtr Name;
        public int DType, ElementBytes, Needed, Rank;
        [MarshalAs(UnmanagedType.ByValArray, SizeConst = 8)] public long[] Dims;
        [MarshalAs(UnmanagedType.ByValArray, SizeConst = 8)] public IntPtr[] Axes;
        public IntPtr Data;
        public long Bytes;
    }

    [DllImport(Library)] public static extern IntPtr attn_last_error();
    [DllImport(Library)] public static extern int attn_open(uint abi, string folder, string ort, int threads, int spin, out ulong bundle);
    [DllImport(Library)] public static extern int attn_close(ulong handle);
    [DllImport(Library)] public static extern int attn_get(ulong handle, int what, out long value);
    [DllImport(Library)] public static extern IntPtr attn_text(ulong bundle, int what);
    [DllImport(Library)] public static extern int attn_describe(ulong bundle, int kind, long index, out Raw value);
    [DllImport(Library)] public static extern int attn_test_case(ulong bundle, long index, [Out] byte[] line, long size);
    [DllImport(Library)] public static extern int attn_session(ulong bundle, out ulong session);
    [DllImport(Library)] public static extern int attn_set_input(ulong session, ref Raw value);
    [DllImport(Library)] public static extern int attn_load_input(ulong session, string name, string path, long rows);
    [DllImport(Library)] public static extern int attn_run(ulong session);
    [DllImport(Library)] public static extern int attn_output(ulong session, string name, int dtype, out Raw value);
    [DllImport(Library)] public static extern int attn_save_output(ulong session, string name, string path);
    [DllImport(Library)] public static extern int attn_prefill(ulong session, long capacity, long[] lengths, long count);
    [DllImport(Library)] public static extern int attn_step(ulong session);
    [DllImport(Library)] public static extern int attn_rewind(ulong session, long tokens);
    [DllImport(Library)] public static extern int attn_fork(ulong session, long[] rows, long count, out ulong fork);
    [DllImport(Library)] public static extern int attn_start(ulong session, long[] ids, long length, long count);
    [DllImport(Library)] public static extern int attn_next(ulong session, out long token);
    [DllImport(Library)] public static extern int attn_embed(ulong bundle, long[] ids, long[] types, long total, long[] lengths, long count, [Out] float[] vectors, long size);

    public static void Check(int code) { if (code != 0) throw new AttnException(code, Text(attn_last_error())); }
    // Strings of C are UTF-8, as everywhere but on Windows.
    public static string Text(IntPtr of) => Marshal.PtrToStringAnsi(of) ?? "";
    public static long Get(ulong handle, Fact what) { Check(attn_get(handle, (int)what, out long value)); return value; }
}

/// <summary>An open bundle. Threads may share it.</summary>
public sealed class Bundle : IDisposable
{
    private readonly ulong handle;

    /// <summary>Opens a folder. ort: the path of ONNX Runtime's library; null: where the system finds it.</summary>
    public Bundle(string folder, string ort = null, int threads = 0, bool spin = false) =>
        Native.Check(Native.attn_open(Native.Version, folder, ort, threads, spin ? 1 : 0, out handle));

    public long Get(Fact what) => Native.Get(handle, what);
    public string Name => Native.Text(Native.attn_text(handle, 0));
    public string RuntimeVersion => Native.Text(Native.attn_text(handle, 1));

    /// <summary>Tells the inputs (Fact.Inputs) or outputs (Fact.Outputs).</summary>
    public Value[] Values(Fact kind)
    {
        var values = new Value[Get(kind)];
        for (int at = 0; at < values.Length; at++)
        {
            Native.Check(Native.attn_describe(handle, (int)kind, at, out var raw));
            values[at] = new Value { Name = Native.Text(raw.Name), DType = raw.DType, ElementBytes = raw.ElementBytes, Needed = raw.Needed != 0,
                                     Dims = raw.Dims.Take(raw.Rank).ToArray(), Axes = raw.Axes.Take(raw.Rank).Select(Native.Text).ToArray() };
        }
        return values;
    }

    /// <summary>Runs a test case; returns whether it passed.</summary>
    public bool TestCase(long index, out string line)
    {
        var bytes = new byte[512];
        int code = Native.attn_test_case(handle, index, bytes, bytes.Length);
        if (code != Native.Mismatch) Native.Check(code);
        line = Encoding.UTF8.GetString(bytes, 0, Array.IndexOf(bytes, (byte)0));
        return code == 0;
    }

    /// <summary>Makes the vectors of texts of token ids. types: those of all tokens, one text after the other; null: 0.</summary>
    public float[][] Embed(long[][] texts, long[] types = null)
    {
        long[] ids = texts.SelectMany(text => text).ToArray(), lengths = texts.Select(text => (long)text.Length).ToArray();
        if (types != null && types.Length != ids.Length) throw new AttnException(Native.Argument, "types are not as many as ids");
        int width = (int)Get(Fact.Width);
        var flat = new float[width * texts.Length];
        Native.Check(Native.attn_embed(handle, ids, types, ids.Length, lengths, texts.Length, flat, flat.Length));
        return texts.Select((text, at) => flat.Skip(at * width).Take(width).ToArray()).ToArray();
    }

    public Session NewSession()
    {
        Native.Check(Native.attn_session(handle, out ulong made));
        return new Session(made);
    }

    /// <summary>Closes the bundle; its sessions still work.</summary>
    public void Dispose() => Native.Check(Native.attn_close(handle));
}

/// <summary>Inputs, outputs, and the caches in between. One thread at a time uses it.</summary>
public sealed class Session : IDisposable
{
    private readonly ulong handle;
    private readonly Dictionary<string, GCHandle> arrays = new Dictionary<string, GCHandle>(); // what the library points to, pinned

    internal Session(ulong handle) { this.handle = handle; }

    // By what ONNX calls a type; float16 and bfloat16 are ushort, and the bytes of any type byte.
    private static readonly Type[] Types = { null, typeof(float), typeof(byte), typeof(sbyte), typeof(ushort), typeof(short), typeof(int), typeof(long),
                                             null, typeof(bool), null, typeof(double), typeof(uint), typeof(ulong) };

    /// <summary>Sets an input. The array is not copied: what is written into it is read at each run.</summary>
    public void SetInput<T>(string name, long[] dims, T[] elements) where T : struct
    {
        var pinned = GCHandle.Alloc(elements, GCHandleType.Pinned);
        var raw = new Native.Raw { Name = Marshal.StringToHGlobalAnsi(name), DType = Array.IndexOf(Types, typeof(T)), Rank = dims.Length, Dims = new long[8],
                                   Axes = new IntPtr[8], Data = pinned.AddrOfPinnedObject(), Bytes = Buffer.ByteLength(elements) };
        Array.Copy(dims, raw.Dims, Math.Min(dims.Length, 8));
        int code = Native.attn_set_input(handle, ref raw);
        Marshal.FreeHGlobal(raw.Name);
        if (code != 0) pinned.Free();
        Native.Check(code);
        if (arrays.TryGetValue(name, out var old)) old.Free();
        arrays[name] = pinned;
    }

    /// <summary>Sets an input to the rows of a .npy file, again from the first until there are so many.</summary>
    public void LoadInput(string name, string path, long rows) => Native.Check(Native.attn_load_input(handle, name, path, rows));

    /// <summary>Writes an output of the last run to a .npy file.</summary>
    public void SaveOutput(string name, string path) => Native.Check(Native.attn_save_output(handle, name, path));

    public long Get(Fact what) => Native.Get(handle, what);
    public void Run() => Native.Check(Native.attn_run(handle));
    public void Step() => Native.Check(Native.attn_step(handle));
    public void Rewind(long tokens) => Native.Check(Native.attn_rewind(handle, tokens));

    /// <summary>lengths: of each row its tokens without the padding on the right; null: all.</summary>
    public void Prefill(long capacity = 0, long[] lengths = null) =>
        Native.Check(Native.attn_prefill(handle, capacity, lengths, lengths == null ? 0 : lengths.Length));

    public Session Fork(params long[] rows)
    {
        Native.Check(Native.attn_fork(handle, rows, rows.Length, out ulong made));
        return new Session(made);
    }

    /// <summary>Returns a copy of an output of the last run, and its sizes.</summary>
    public T[] Output<T>(string name, out long[] dims) where T : struct
    {
        Native.Check(Native.attn_output(handle, name, Array.IndexOf(Types, typeof(T)), out var raw));
        dims = raw.Dims.Take(raw.Rank).ToArray();
        var bytes = new byte[raw.Bytes];
        if (raw.Bytes > 0) Marshal.Copy(raw.Data, bytes, 0, bytes.Length);
        var elements = new T[raw.Bytes / Marshal.SizeOf<T>()];
        Buffer.BlockCopy(bytes, 0, elements, 0, bytes.Length);
        return elements;
    }

    /// <summary>Continues a text of token ids by at most count tokens.</summary>
    public IEnumerable<long> Generate(long[] ids, long count)
    {
        Native.Check(Native.attn_start(handle, ids, ids.Length, count));
        for (int code; (code = Native.attn_next(handle, out long token)) != Native.End;)
        {
            Native.Check(code);
            yield return token;
        }
    }

    public void Dispose()
    {
        Native.Check(Native.attn_close(handle));
        foreach (var pinned in arrays.Values) pinned.Free();
    }
}
