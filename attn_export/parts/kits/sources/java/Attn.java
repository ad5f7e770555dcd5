import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Tests the bundle, runs it on an array of your own, decodes, generates, and embeds. */
public final class Attn {
    private static final String USAGE =
        "usage: Attn self-test [BUNDLE] | run IN.npy BATCH OUT.npy | decode [TOKENS] | generate ID,ID,... [TOKENS] | embed ID,ID,...";
    private static final List<String> TYPES = // by the number that ONNX has for it
        Arrays.asList("", "f4", "u1", "i1", "u2", "i2", "i4", "i8", "", "b1", "f2", "f8", "u4", "u8", "", "", "u2");
    private static final Pattern HEADER = Pattern.compile(
        "'descr': *'[<|](\\w+)', *'fortran_order': *False, *'shape': *\\(([\\d, ]*)\\)");

    private static AttnExport open(String folder, boolean spin) {
        return new AttnExport(folder, System.getenv("ORT_DYLIB_PATH"), 0, spin);
    }

    private static long number(String text) {
        try {
            return Long.parseLong(text);
        } catch (NumberFormatException error) {
            return -1;
        }
    }

    private static boolean selfTest(String folder) {
        try (AttnExport bundle = open(folder, false)) {
            long count = bundle.get(AttnExport.CASES), good = 0;
            for (long index = 0; index < count; index++) {
                String line = bundle.testCase(index);
                if (line.startsWith("ok ")) good++;
                System.out.println(line);
            }
            System.out.printf("%s: %d of %d passed, ONNX Runtime %s%n", bundle.text(0), good, count, bundle.text(1));
            return good == count;
        }
    }

    /** Runs the bundle on the rows of a file, which are repeated until there are so many as the batch. */
    private static boolean run(String path, long batch, String out) throws IOException {
        byte[] file = Files.readAllBytes(Path.of(path));
        int end = file.length < 10 || file[6] != 1 ? 0 : 10 + (file[8] & 255) + 256 * (file[9] & 255);
        Matcher header = HEADER.matcher(new String(file, 0, Math.min(end, file.length), StandardCharsets.ISO_8859_1));
        if (!header.find()) throw new IOException(path + " is no .npy of numbers in C order");
        long[] dims = Arrays.stream(header.group(2).split("[, ]+")).filter(size -> !size.isEmpty()).mapToLong(Attn::number).toArray();
        try (AttnExport bundle = open("bundle", false); AttnExport.Session session = bundle.session()) {
            AttnExport.Value input = bundle.values(AttnExport.INPUTS)[0];
            if (TYPES.indexOf(header.group(1)) != input.dtype || dims.length == 0 || dims[0] < 1 || batch < 1) {
                throw new IOException(path + " is not " + input.name + " of type " + input.dtype + ", or the batch not from 1");
            }
            long rows = dims[0], size = file.length - end;
            dims[0] = batch;
            ByteBuffer elements = session.setInput(input.name, dims);
            if (size == 0 || size * batch != elements.capacity() * rows) throw new IOException(path + " has bytes that are not those of its sizes");
            for (int at = 0; at < elements.capacity(); at++) elements.put(at, file[end + (int) (at % size)]);
            session.prefill(0);
            AttnExport.Value first = bundle.values(AttnExport.OUTPUTS)[0];
            String sizes = Arrays.toString(session.dims(first.name)), kind = TYPES.get(first.dtype);
            String text = String.format("{'descr': '%s%s', 'fortran_order': False, 'shape': (%s,), }",
                kind.endsWith("1") ? "|" : "<", kind, sizes.substring(1, sizes.length() - 1));
            byte[] output = session.output(first.name).array();
            ByteBuffer npy = ByteBuffer.allocate(128 + output.length).order(ByteOrder.LITTLE_ENDIAN);
            npy.put("\u0093NUMPY\u0001\0v\0".getBytes(StandardCharsets.ISO_8859_1));
            npy.put(String.format("%-117s\n", text).getBytes(StandardCharsets.ISO_8859_1)).put(output);
            Files.write(Path.of(out), npy.array());
            System.out.println(out + ": " + first.name + " " + sizes);
        }
        return true;
    }

    /** Sets the inputs that a session does not make to zeros, for some tokens. */
    private static void setZeros(AttnExport bundle, AttnExport.Session session, long tokens) {
        for (AttnExport.Value input : bundle.values(AttnExport.INPUTS)) {
            long[] dims = Arrays.copyOf(input.dims, input.rank);
            for (int at = 0; at < dims.length; at++) {
                if (dims[at] < 0) dims[at] = input.axis(at).equals("query_len") ? tokens : 1;
            }
            if (input.needed != 0) session.setInput(input.name, dims);
        }
    }

    private static boolean decode(long tokens) {
        if (tokens < 1) throw new IllegalArgumentException("TOKENS is a number from 1");
        try (AttnExport bundle = open("bundle", true); AttnExport.Session session = bundle.session()) {
            if (bundle.get(AttnExport.CACHE) == 0) {
                System.out.println(bundle.text(0) + " has no KV cache: there is nothing to decode");
                return true;
            }
            setZeros(bundle, session, 8);
            session.prefill(8 + 64);
            setZeros(bundle, session, 1);
            long start = System.nanoTime();
            for (long made = 0; made < tokens; made++) {
                // Your program would write the next token into the buffer that setInput returned.
                if (made > 0 && made % 64 == 0) session.rewind(64);
                session.step();
            }
            double each = (System.nanoTime() - start) / 1e6 / tokens;
            System.out.printf("%d tokens: %.4f ms per token, %d held%n", tokens, each, session.get(AttnExport.HELD));
        }
        return true;
    }

    /** Reads ids with commas between them; what is no id is -1. */
    private static long[] numbers(String ids) {
        return ids.isEmpty() ? new long[0] : Arrays.stream(ids.split(",", -1)).mapToLong(Attn::number).toArray();
    }

    /** Prints the vectors of texts, in each word but the first the ids of one. */
    private static boolean embed(String[] words) {
        try (AttnExport bundle = open("bundle", false)) {
            for (float[] vector : bundle.embed(Arrays.stream(words).skip(1).map(Attn::numbers).toArray(long[][]::new))) {
                System.out.println(Arrays.toString(vector).replaceAll("[\\[,\\]]", ""));
            }
        }
        return true;
    }

    private static boolean generate(String ids, long count) {
        try (AttnExport bundle = open("bundle", true); AttnExport.Session session = bundle.session()) {
            String between = "";
            for (Iterator<Long> tokens = session.generate(numbers(ids), count); tokens.hasNext(); between = " ") {
                System.out.print(between + tokens.next());
            }
            System.out.println();
        }
        return true;
    }

    public static void main(String[] words) {
        String command = words.length > 1 && words[0].equals("embed") ? "embed" : words.length + (words.length > 0 ? words[0] : "");
        try {
            boolean good = switch (command) {
                case "1self-test", "2self-test" -> selfTest(words.length > 1 ? words[1] : "bundle");
                case "4run" -> run(words[1], number(words[2]), words[3]);
                case "1decode", "2decode" -> decode(number(words.length > 1 ? words[1] : "64"));
                case "2generate", "3generate" -> generate(words[1], number(words.length > 2 ? words[2] : "64"));
                case "embed" -> embed(words);
                default -> throw new IllegalArgumentException(USAGE);
            };
            System.exit(good ? 0 : 1);
        } catch (AttnExport.AttnException | IllegalArgumentException | IOException error) {
            System.err.println(error.getMessage());
            System.exit(2);
        }
    }
}
