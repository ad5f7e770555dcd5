import java.util.Arrays;

/** Tests the bundle, runs it on an array of your own, decodes, generates, and embeds. */
public final class Attn {
    private static final String USAGE =
        "usage: Attn self-test [BUNDLE] | run IN.npy BATCH OUT.npy | decode [TOKENS] | generate ID,ID,... [TOKENS] | embed ID,ID,...";

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
    private static boolean run(String path, long batch, String out) {
        try (AttnExport bundle = open("bundle", false); AttnExport.Session session = bundle.session()) {
            String name = bundle.values(AttnExport.OUTPUTS)[0].name;
            session.loadInput(bundle.values(AttnExport.INPUTS)[0].name, path, batch);
            session.prefill(0);
            session.saveOutput(name, out);
            System.out.println(out + ": " + name + " " + Arrays.toString(session.dims(name)));
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
            session.start(numbers(ids), count);
            for (long token = session.next(); token >= 0; token = session.next(), between = " ") {
                System.out.print(between + token);
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
        } catch (AttnExport.AttnException | IllegalArgumentException error) {
            System.err.println(error.getMessage());
            System.exit(2);
        }
    }
}
