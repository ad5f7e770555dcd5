import com.sun.jna.Native;
import com.sun.jna.NativeLibrary;
import com.sun.jna.Pointer;
import com.sun.jna.Structure;
import com.sun.jna.ptr.LongByReference;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/** A bundle in ONNX Runtime, through the C library in library/; attn_export.h is its reference. */
public final class AttnExport implements AutoCloseable {
    public static final int INPUTS = 0, OUTPUTS = 1, CASES = 2, CACHE = 3, VOCABULARY = 4, MOST_TOKENS = 5, WIDTH = 6, HELD = 16, COPIED = 17;
    private static final int VERSION = 2, END = 1, ARGUMENT = 2, MISMATCH = 8;

    static {
        // -Dattn.library=FOLDER: where the library is, if not where CMake builds it.
        NativeLibrary.addSearchPath("attn_export", System.getProperty("attn.library", "library/build"));
        Native.register(AttnExport.class, "attn_export");
    }

    private static native String attn_last_error();
    private static native int attn_open(int abi, String folder, String ort, int threads, int spin, LongByReference bundle);
    private static native int attn_close(long handle);
    private static native int attn_get(long handle, int what, LongByReference value);
    private static native String attn_text(long bundle, int what);
    private static native int attn_describe(long bundle, int kind, long index, Value value);
    private static native int attn_test_case(long bundle, long index, byte[] line, long size);
    private static native int attn_session(long bundle, LongByReference session);
    private static native int attn_set_input(long session, Value value);
    private static native int attn_load_input(long session, String name, String path, long rows);
    private static native int attn_run(long session);
    private static native int attn_output(long session, String name, int dtype, Value value);
    private static native int attn_save_output(long session, String name, String path);
    private static native int attn_prefill(long session, long capacity, long[] lengths, long count);
    private static native int attn_step(long session);
    private static native int attn_rewind(long session, long tokens);
    private static native int attn_fork(long session, long[] rows, long count, LongByReference fork);
    private static native int attn_start(long session, long[] ids, long length, long count);
    private static native int attn_next(long session, LongByReference token);
    private static native int attn_embed(long bundle, long[] ids, long[] types, long total, long[] lengths, long count, float[] vectors, long size);

    /** A code of attn_export.h, and one line. */
    public static final class AttnException extends RuntimeException {
        public final int code;

        AttnException(int code, String text) { super(text); this.code = code; }
    }

    private static void check(int code) {
        if (code != 0) throw new AttnException(code, attn_last_error());
    }

    private static long get(long handle, int what) {
        LongByReference value = new LongByReference();
        check(attn_get(handle, what, value));
        return value.getValue();
    }

    /** An input or output: its fixed sizes, or -1 where an axis has a name. */
    @Structure.FieldOrder({"name", "dtype", "elementBytes", "needed", "rank", "dims", "axes", "data", "bytes"})
    public static final class Value extends Structure {
        public String name;
        public int dtype, elementBytes, needed, rank;
        public long[] dims = new long[8];
        public Pointer[] axes = new Pointer[8];
        public Pointer data;
        public long bytes;

        public String axis(int at) { return axes[at] == null ? null : axes[at].getString(0, "UTF-8"); }
    }

    private final long handle;

    /** Opens a folder. ort: the path of ONNX Runtime's library; null: where the system finds it. */
    public AttnExport(String folder, String ort, int threads, boolean spin) {
        LongByReference made = new LongByReference();
        check(attn_open(VERSION, folder, ort, threads, spin ? 1 : 0, made));
        handle = made.getValue();
    }

    public long get(int what) { return get(handle, what); }

    /** Returns the name of the bundle (0), or the version of ONNX Runtime (1). */
    public String text(int what) { return attn_text(handle, what); }

    /** Tells the inputs (INPUTS) or outputs (OUTPUTS). */
    public Value[] values(int kind) {
        Value[] values = new Value[(int) get(kind)];
        for (int at = 0; at < values.length; at++) {
            values[at] = new Value();
            check(attn_describe(handle, kind, at, values[at]));
        }
        return values;
    }

    /** Runs a test case. Returns a line, which begins with "ok" if it passed. */
    public String testCase(long index) {
        byte[] line = new byte[512];
        int code = attn_test_case(handle, index, line, line.length);
        if (code != MISMATCH) check(code);
        return Native.toString(line, "UTF-8");
    }

    /** Makes the vectors of texts of token ids. types: those of all tokens, one text after the other; none: 0. */
    public float[][] embed(long[][] texts, long... types) {
        long[] ids = Arrays.stream(texts).flatMapToLong(Arrays::stream).toArray();
        long[] lengths = Arrays.stream(texts).mapToLong(text -> text.length).toArray();
        if (types.length != 0 && types.length != ids.length) throw new AttnException(ARGUMENT, "types are not as many as ids");
        float[] flat = new float[Math.toIntExact(get(WIDTH) * texts.length)];
        check(attn_embed(handle, ids, types.length == 0 ? null : types, ids.length, lengths, texts.length, flat, flat.length));
        float[][] vectors = new float[texts.length][];
        int width = flat.length / texts.length;
        for (int at = 0; at < texts.length; at++) vectors[at] = Arrays.copyOfRange(flat, at * width, (at + 1) * width);
        return vectors;
    }

    public Session session() {
        LongByReference made = new LongByReference();
        check(attn_session(handle, made));
        return new Session(made.getValue());
    }

    /** Closes the bundle; its sessions still work. */
    @Override
    public void close() { check(attn_close(handle)); }

    /** Inputs, outputs, and the caches in between. One thread at a time uses it. */
    public static final class Session implements AutoCloseable {
        private final long handle;
        private final Map<String, ByteBuffer> arrays = new HashMap<>(); // what the library points to

        private Session(long handle) { this.handle = handle; }

        /** Makes an input of zeros. What is written into the buffer is read at each run. */
        public ByteBuffer setInput(String name, long... dims) {
            Value value = new Value();
            value.name = name;
            value.rank = dims.length;
            System.arraycopy(dims, 0, value.dims, 0, Math.min(dims.length, 8));
            check(attn_set_input(handle, value)); // checks the sizes, and tells the bytes
            ByteBuffer array = ByteBuffer.allocateDirect(Math.toIntExact(value.bytes)).order(ByteOrder.nativeOrder());
            value.data = Native.getDirectBufferPointer(array);
            check(attn_set_input(handle, value));
            arrays.put(name, array);
            return array;
        }

        /** Sets an input to the rows of a .npy file, again from the first until there are so many. */
        public void loadInput(String name, String path, long rows) { check(attn_load_input(handle, name, path, rows)); }

        /** Writes an output of the last run to a .npy file. */
        public void saveOutput(String name, String path) { check(attn_save_output(handle, name, path)); }

        public long get(int what) { return AttnExport.get(handle, what); }
        public void run() { check(attn_run(handle)); }
        public void step() { check(attn_step(handle)); }
        public void rewind(long tokens) { check(attn_rewind(handle, tokens)); }

        /** lengths: of each row its tokens without the padding on the right; none: all. */
        public void prefill(long capacity, long... lengths) { check(attn_prefill(handle, capacity, lengths.length == 0 ? null : lengths, lengths.length)); }

        public Session fork(long... rows) {
            LongByReference made = new LongByReference();
            check(attn_fork(handle, rows, rows.length, made));
            return new Session(made.getValue());
        }

        /** Returns the sizes of an output of the last run. */
        public long[] dims(String name) {
            Value value = new Value();
            check(attn_output(handle, name, 0, value));
            return Arrays.copyOf(value.dims, value.rank);
        }

        /** Returns a copy of an output of the last run, which stays when the session goes on. */
        public ByteBuffer output(String name) {
            Value value = new Value();
            check(attn_output(handle, name, 0, value));
            byte[] copy = value.bytes == 0 ? new byte[0] : value.data.getByteArray(0, Math.toIntExact(value.bytes));
            return ByteBuffer.wrap(copy).order(ByteOrder.nativeOrder());
        }

        /** Begins a text of at most count tokens after token ids. */
        public void start(long[] ids, long count) { check(attn_start(handle, ids, ids.length, count)); }

        /** Makes the next token; returns -1 after the one that ends the text. */
        public long next() {
            LongByReference token = new LongByReference();
            int code = attn_next(handle, token);
            if (code == END) return -1;
            check(code);
            return token.getValue();
        }

        @Override
        public void close() { check(attn_close(handle)); }
    }
}
